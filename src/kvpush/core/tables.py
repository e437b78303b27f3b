"""The life of a transfer, as two tables: state x input -> next state and what to do.

Rules the tables hold (numbers as in docs/protocol.md):
  R1  a receiver leaves REGISTERED, ACCEPTED and CANCELLING only when the sender has said that it will write
      no more (a full set of notices, Failed, Dropped, Drained), or through QUARANTINED, whose only way out
      other than such a word is time.
  R2  a sender posts only in WAITING and WRITING; it leaves WRITING and DRAINING for RETIRED only when
      nothing is in flight.
  R3  RETIRED is left never; entering it reports the one outcome.
  R9  every Cancel is answered: Dropped where nothing is in flight, Draining then Drained where something is.

With pull the receiver posts READs, and the rules change sides:
  R1  no sender ever learns of a receiver's blocks. They are in use while a READ of the receiver's own is in flight
      (READING, STOPPING), and for a time after the way was closed under one (SEVERED).
  R2  a sender keeps its blocks in OFFERED and RECALLED until the receiver says that it reads no more, or the lease
      ends. What was read counts only if the lease still held when the receiver said so (CONFIRM).

An input with no entry is an error that changes nothing: a bug when it came from our engine, a refusal when
it came from a peer. Guards are resolved before the table is asked, so each entry is unconditional.
"""

from enum import StrEnum


class Send(StrEnum):
    """Sender states."""

    NEW = "new"
    WATCHED = "watched"  # a receiver waits for it to begin; our engine has not heard of it
    ANNOUNCED = "announced"  # the engine has the request; no blocks, no registration
    HELD = "held"  # blocks are final; no registration
    WAITING = "waiting"  # registered; nothing in flight, not complete
    WRITING = "writing"  # registered; writes in flight
    DRAINING = "draining"  # closed to posting; writes still in flight
    PROMISED = "promised"  # asked for by a receiver that will read; not complete
    OFFERED = "offered"  # complete, and being read as far as we know
    RECALLED = "recalled"  # told that it has failed; may still be being read
    RETIRED = "retired"


class SendInput(StrEnum):
    """What can happen to a sender's transfer."""

    ANNOUNCE = "announce"
    WATCH = "watch"  # a receiver wants to know when it has begun
    BEGIN = "begin"  # it has
    SAMPLED = "sampled"  # the token after the prompt is known, or there will be none
    FINAL = "final"
    REGISTER = "register"
    POST = "post"  # there is something to write and it is being posted
    PAUSE = "pause"  # the last write in flight is done, and more is to come
    COMPLETE = "complete"  # the last write of the span is done
    RETRACT = "retract"  # what was final is no more
    WRITE_FAILED = "write_failed"
    STOPPED = "stopped"  # nothing is in flight any more
    CANCEL = "cancel"
    WITHDRAW = "withdraw"
    EXPIRE = "expire"
    PEER_LOST = "peer_lost"
    ASK = "ask"  # a registration that wants to read
    OFFER = "offer"  # all of it is final and pinned
    RELEASE = "release"  # the receiver has read it all


class SendAction(StrEnum):
    """What a sender does on a transition."""

    ANSWER = "answer"  # tell who has asked that it has begun, if it has
    ACCEPT = "accept"  # tell the receiver that its registration is valid
    ADVANCE = "advance"  # write what is final and registered
    DROP = "drop"  # Dropped
    CLOSE = "close"  # post no more; what is in flight has a time to stop
    DRAIN = "drain"  # Draining
    TELL = "tell"  # Drained after a cancel, else Failed
    HINT = "hint"  # Written
    OFFER = "offer"  # say where to read, if it is complete
    CONFIRM = "confirm"  # what was read is right: the lease holds
    RETIRE = "retire"  # report the outcome, free the source


S, H, A = Send, SendInput, SendAction

SENDER: dict[tuple[Send, SendInput], tuple[Send, tuple[SendAction, ...]]] = {
    (S.NEW, H.ANNOUNCE): (S.ANNOUNCED, ()),
    (S.NEW, H.WATCH): (S.WATCHED, ()),
    (S.NEW, H.FINAL): (S.HELD, ()),
    (S.NEW, H.REGISTER): (S.WAITING, (A.ACCEPT,)),
    (S.NEW, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.NEW, H.WITHDRAW): (S.RETIRED, (A.RETIRE,)),
    (S.WATCHED, H.ANNOUNCE): (S.ANNOUNCED, ()),
    (S.WATCHED, H.WATCH): (S.WATCHED, ()),
    (S.WATCHED, H.FINAL): (S.HELD, (A.ANSWER,)),
    (S.WATCHED, H.REGISTER): (S.WAITING, (A.ACCEPT,)),
    (S.WATCHED, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.WATCHED, H.WITHDRAW): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.WATCHED, H.EXPIRE): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.WATCHED, H.PEER_LOST): (S.RETIRED, (A.RETIRE,)),
    (S.ANNOUNCED, H.WATCH): (S.ANNOUNCED, (A.ANSWER,)),
    (S.ANNOUNCED, H.BEGIN): (S.ANNOUNCED, (A.ANSWER,)),
    (S.ANNOUNCED, H.SAMPLED): (S.ANNOUNCED, ()),
    (S.ANNOUNCED, H.FINAL): (S.HELD, (A.ANSWER,)),
    (S.ANNOUNCED, H.RETRACT): (S.ANNOUNCED, ()),
    (S.ANNOUNCED, H.REGISTER): (S.WAITING, (A.ACCEPT,)),
    (S.ANNOUNCED, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.ANNOUNCED, H.WITHDRAW): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.HELD, H.WATCH): (S.HELD, (A.ANSWER,)),
    (S.HELD, H.BEGIN): (S.HELD, (A.ANSWER,)),
    (S.HELD, H.SAMPLED): (S.HELD, ()),
    (S.HELD, H.FINAL): (S.HELD, (A.ANSWER,)),
    (S.HELD, H.RETRACT): (S.HELD, ()),
    (S.HELD, H.REGISTER): (S.WAITING, (A.ACCEPT, A.ADVANCE)),
    (S.HELD, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.HELD, H.WITHDRAW): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.HELD, H.EXPIRE): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.WAITING, H.ANNOUNCE): (S.WAITING, ()),
    (S.WAITING, H.WATCH): (S.WAITING, ()),
    (S.WAITING, H.BEGIN): (S.WAITING, ()),
    (S.WAITING, H.SAMPLED): (S.WAITING, (A.ADVANCE,)),
    (S.WAITING, H.FINAL): (S.WAITING, (A.ADVANCE,)),
    (S.WAITING, H.RETRACT): (S.WAITING, ()),
    (S.WAITING, H.REGISTER): (S.WAITING, (A.ACCEPT,)),
    (S.WAITING, H.POST): (S.WRITING, ()),
    (S.WAITING, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.WAITING, H.WITHDRAW): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.WAITING, H.EXPIRE): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.WAITING, H.PEER_LOST): (S.RETIRED, (A.RETIRE,)),
    (S.WRITING, H.ANNOUNCE): (S.WRITING, ()),
    (S.WRITING, H.WATCH): (S.WRITING, ()),
    (S.WRITING, H.BEGIN): (S.WRITING, ()),
    (S.WRITING, H.SAMPLED): (S.WRITING, (A.ADVANCE,)),
    (S.WRITING, H.FINAL): (S.WRITING, (A.ADVANCE,)),
    (S.WRITING, H.RETRACT): (S.WRITING, ()),
    (S.WRITING, H.REGISTER): (S.WRITING, (A.ACCEPT,)),
    (S.WRITING, H.POST): (S.WRITING, ()),
    (S.WRITING, H.PAUSE): (S.WAITING, (A.ADVANCE,)),
    (S.WRITING, H.COMPLETE): (S.RETIRED, (A.HINT, A.RETIRE)),
    (S.WRITING, H.WRITE_FAILED): (S.DRAINING, (A.CLOSE,)),
    (S.WRITING, H.CANCEL): (S.DRAINING, (A.CLOSE, A.DRAIN)),
    (S.WRITING, H.WITHDRAW): (S.DRAINING, (A.CLOSE,)),
    (S.WRITING, H.EXPIRE): (S.DRAINING, (A.CLOSE,)),
    (S.WRITING, H.PEER_LOST): (S.DRAINING, (A.CLOSE,)),
    (S.DRAINING, H.ANNOUNCE): (S.DRAINING, ()),
    (S.DRAINING, H.WATCH): (S.DRAINING, ()),
    (S.DRAINING, H.BEGIN): (S.DRAINING, ()),
    (S.DRAINING, H.SAMPLED): (S.DRAINING, ()),
    (S.DRAINING, H.FINAL): (S.DRAINING, ()),
    (S.DRAINING, H.RETRACT): (S.DRAINING, ()),
    (S.DRAINING, H.REGISTER): (S.DRAINING, ()),
    (S.DRAINING, H.WRITE_FAILED): (S.DRAINING, ()),
    (S.DRAINING, H.STOPPED): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.DRAINING, H.CANCEL): (S.DRAINING, (A.DRAIN,)),
    (S.DRAINING, H.WITHDRAW): (S.DRAINING, ()),
    (S.DRAINING, H.PEER_LOST): (S.DRAINING, ()),
    # pull
    (S.NEW, H.ASK): (S.PROMISED, (A.ACCEPT,)),
    (S.WATCHED, H.ASK): (S.PROMISED, (A.ACCEPT,)),
    (S.ANNOUNCED, H.ASK): (S.PROMISED, (A.ACCEPT,)),
    (S.HELD, H.ASK): (S.PROMISED, (A.ACCEPT, A.OFFER)),
    (S.PROMISED, H.ANNOUNCE): (S.PROMISED, ()),
    (S.PROMISED, H.WATCH): (S.PROMISED, ()),
    (S.PROMISED, H.BEGIN): (S.PROMISED, ()),
    (S.PROMISED, H.SAMPLED): (S.PROMISED, (A.OFFER,)),
    (S.PROMISED, H.FINAL): (S.PROMISED, (A.OFFER,)),
    (S.PROMISED, H.RETRACT): (S.PROMISED, ()),
    (S.PROMISED, H.ASK): (S.PROMISED, (A.ACCEPT,)),
    (S.PROMISED, H.OFFER): (S.OFFERED, ()),
    (S.PROMISED, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.PROMISED, H.WITHDRAW): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.PROMISED, H.EXPIRE): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.PROMISED, H.PEER_LOST): (S.RETIRED, (A.RETIRE,)),
    (S.OFFERED, H.ANNOUNCE): (S.OFFERED, ()),
    (S.OFFERED, H.WATCH): (S.OFFERED, ()),
    (S.OFFERED, H.BEGIN): (S.OFFERED, ()),
    (S.OFFERED, H.SAMPLED): (S.OFFERED, ()),
    (S.OFFERED, H.FINAL): (S.OFFERED, ()),
    (S.OFFERED, H.ASK): (S.OFFERED, (A.ACCEPT, A.OFFER)),
    (S.OFFERED, H.RELEASE): (S.RETIRED, (A.CONFIRM, A.RETIRE)),
    (S.OFFERED, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.OFFERED, H.WITHDRAW): (S.RECALLED, (A.TELL,)),
    (S.OFFERED, H.EXPIRE): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.OFFERED, H.PEER_LOST): (S.RETIRED, (A.RETIRE,)),
    (S.RECALLED, H.ANNOUNCE): (S.RECALLED, ()),
    (S.RECALLED, H.WATCH): (S.RECALLED, ()),
    (S.RECALLED, H.BEGIN): (S.RECALLED, ()),
    (S.RECALLED, H.SAMPLED): (S.RECALLED, ()),
    (S.RECALLED, H.FINAL): (S.RECALLED, ()),
    (S.RECALLED, H.ASK): (S.RECALLED, (A.TELL,)),
    (S.RECALLED, H.RELEASE): (S.RETIRED, (A.TELL, A.RETIRE)),
    (S.RECALLED, H.CANCEL): (S.RETIRED, (A.DROP, A.RETIRE)),
    (S.RECALLED, H.WITHDRAW): (S.RECALLED, ()),
    (S.RECALLED, H.EXPIRE): (S.RETIRED, (A.RETIRE,)),
    (S.RECALLED, H.PEER_LOST): (S.RETIRED, (A.RETIRE,)),
}


class Recv(StrEnum):
    """Receiver states."""

    NEW = "new"
    EXPECTING = "expecting"  # the engine has the request; it has no blocks yet
    WATCHING = "watching"  # likewise, and the engine waits to hear that the sender has begun
    CONNECTING = "connecting"  # blocks are there; the sender is not ready to hear of them
    REGISTERED = "registered"  # Register has left
    ACCEPTED = "accepted"  # and was answered
    CANCELLING = "cancelling"  # Cancel has left, or will when the sender can be reached
    QUARANTINED = "quarantined"  # the sender is gone or silent; a late write may still land
    ASKED = "asked"  # Register has left, with the wish to read
    PROMISED = "promised"  # and was answered
    READING = "reading"  # READs in flight
    RELEASING = "releasing"  # all is read; the sender must confirm that it was right
    STOPPING = "stopping"  # given up, but READs are in flight
    SEVERED = "severed"  # the way was closed under READs in flight: they may still land
    RETIRED = "retired"


class RecvInput(StrEnum):
    """What can happen to a receiver's transfer."""

    EXPECT = "expect"
    WATCH = "watch"
    BEGUN = "begun"  # the sender has begun, or will never
    RECEIVE = "receive"
    READY = "ready"  # the sender can be told
    ACCEPT = "accept"
    COMPLETE = "complete"  # every part's notice has arrived
    FAIL = "fail"  # the sender said that it will write no more, and has not written all
    RELEASE = "release"  # Dropped or Drained
    DRAIN = "drain"  # Draining
    DOOMED = "doomed"  # the sender cannot be told, and it was never told of any block
    ABORT = "abort"
    GIVE_UP = "give_up"  # a deadline of ours has passed
    PEER_LOST = "peer_lost"
    SAFE = "safe"  # the quarantine is over
    ASK = "ask"  # the sender can be told, and its memory be read
    OFFER = "offer"  # the sender says where to read
    READ = "read"  # all is read
    READ_FAILED = "read_failed"
    STOPPED = "stopped"  # no READ is in flight any more


class RecvAction(StrEnum):
    """What a receiver does on a transition."""

    WATCH = "watch"  # Interest has left, or will when the sender can be reached
    REPORT = "report"  # tell our engine that it is time for blocks
    REGISTER = "register"
    CANCEL = "cancel"
    FREE = "free"  # the blocks were never promised to anyone: give them back
    QUARANTINE = "quarantine"
    INQUIRE = "inquire"  # a lost sender that is back is asked for its word
    EXTEND = "extend"  # wait longer: the sender says that writes are in flight
    ASK = "ask"  # Register, with the wish to read
    READ = "read"  # post READs
    RELEASE = "release"  # Released
    STOP = "stop"  # what is in flight has a time to stop
    SEVER = "sever"  # let the request go on; its blocks wait
    RETIRE = "retire"  # report the outcome, give the blocks back


R, J, B = Recv, RecvInput, RecvAction

RECEIVER: dict[tuple[Recv, RecvInput], tuple[Recv, tuple[RecvAction, ...]]] = {
    (R.NEW, J.EXPECT): (R.EXPECTING, ()),
    (R.NEW, J.RECEIVE): (R.CONNECTING, ()),
    (R.EXPECTING, J.WATCH): (R.WATCHING, (B.WATCH,)),
    (R.EXPECTING, J.RECEIVE): (R.CONNECTING, ()),
    (R.EXPECTING, J.READY): (R.EXPECTING, ()),
    (R.EXPECTING, J.ABORT): (R.CANCELLING, (B.CANCEL,)),
    (R.EXPECTING, J.PEER_LOST): (R.EXPECTING, ()),
    (R.EXPECTING, J.FAIL): (R.EXPECTING, ()),
    (R.WATCHING, J.READY): (R.WATCHING, (B.WATCH,)),
    (R.WATCHING, J.BEGUN): (R.EXPECTING, (B.REPORT,)),
    (R.WATCHING, J.FAIL): (R.EXPECTING, (B.REPORT,)),
    (R.WATCHING, J.PEER_LOST): (R.EXPECTING, (B.REPORT,)),
    (R.WATCHING, J.RECEIVE): (R.CONNECTING, ()),
    (R.WATCHING, J.ABORT): (R.CANCELLING, (B.CANCEL,)),
    (R.CONNECTING, J.READY): (R.REGISTERED, (B.REGISTER,)),
    (R.CONNECTING, J.DOOMED): (R.RETIRED, (B.RETIRE,)),
    (R.CONNECTING, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.CONNECTING, J.PEER_LOST): (R.RETIRED, (B.RETIRE,)),
    (R.CONNECTING, J.ABORT): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.REGISTERED, J.READY): (R.REGISTERED, (B.REGISTER,)),
    (R.REGISTERED, J.ACCEPT): (R.ACCEPTED, ()),
    (R.REGISTERED, J.COMPLETE): (R.RETIRED, (B.RETIRE,)),
    (R.REGISTERED, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.REGISTERED, J.RELEASE): (R.RETIRED, (B.RETIRE,)),
    (R.REGISTERED, J.ABORT): (R.CANCELLING, (B.CANCEL,)),
    (R.REGISTERED, J.GIVE_UP): (R.CANCELLING, (B.CANCEL,)),
    (R.REGISTERED, J.PEER_LOST): (R.QUARANTINED, (B.QUARANTINE,)),
    (R.ACCEPTED, J.READY): (R.ACCEPTED, ()),
    (R.ACCEPTED, J.ACCEPT): (R.ACCEPTED, ()),
    (R.ACCEPTED, J.COMPLETE): (R.RETIRED, (B.RETIRE,)),
    (R.ACCEPTED, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.ACCEPTED, J.RELEASE): (R.RETIRED, (B.RETIRE,)),
    (R.ACCEPTED, J.ABORT): (R.CANCELLING, (B.CANCEL,)),
    (R.ACCEPTED, J.GIVE_UP): (R.CANCELLING, (B.CANCEL,)),
    (R.ACCEPTED, J.PEER_LOST): (R.QUARANTINED, (B.QUARANTINE,)),
    (R.CANCELLING, J.READY): (R.CANCELLING, (B.CANCEL,)),
    (R.CANCELLING, J.ACCEPT): (R.CANCELLING, ()),
    (R.CANCELLING, J.COMPLETE): (R.RETIRED, (B.RETIRE,)),
    (R.CANCELLING, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.CANCELLING, J.RELEASE): (R.RETIRED, (B.RETIRE,)),
    (R.CANCELLING, J.ABORT): (R.CANCELLING, ()),
    (R.CANCELLING, J.DRAIN): (R.CANCELLING, (B.EXTEND,)),
    (R.CANCELLING, J.DOOMED): (R.RETIRED, (B.RETIRE,)),
    (R.CANCELLING, J.GIVE_UP): (R.QUARANTINED, (B.QUARANTINE,)),
    (R.CANCELLING, J.PEER_LOST): (R.QUARANTINED, (B.QUARANTINE,)),
    (R.QUARANTINED, J.ABORT): (R.QUARANTINED, ()),
    (R.QUARANTINED, J.READY): (R.QUARANTINED, (B.INQUIRE,)),
    (R.QUARANTINED, J.DRAIN): (R.QUARANTINED, (B.EXTEND,)),
    (R.QUARANTINED, J.ACCEPT): (R.QUARANTINED, ()),
    (R.QUARANTINED, J.PEER_LOST): (R.QUARANTINED, ()),
    (R.QUARANTINED, J.COMPLETE): (R.RETIRED, (B.RETIRE,)),
    (R.QUARANTINED, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.QUARANTINED, J.RELEASE): (R.RETIRED, (B.RETIRE,)),
    (R.QUARANTINED, J.SAFE): (R.RETIRED, (B.RETIRE,)),
    # pull
    (R.CONNECTING, J.ASK): (R.ASKED, (B.ASK,)),
    (R.CONNECTING, J.GIVE_UP): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.ASKED, J.ASK): (R.ASKED, (B.ASK,)),
    (R.ASKED, J.ACCEPT): (R.PROMISED, ()),
    (R.ASKED, J.OFFER): (R.READING, (B.READ,)),
    (R.ASKED, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.ASKED, J.RELEASE): (R.RETIRED, (B.RETIRE,)),
    (R.ASKED, J.ABORT): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.ASKED, J.GIVE_UP): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.ASKED, J.PEER_LOST): (R.RETIRED, (B.RETIRE,)),
    (R.PROMISED, J.ASK): (R.PROMISED, ()),
    (R.PROMISED, J.ACCEPT): (R.PROMISED, ()),
    (R.PROMISED, J.OFFER): (R.READING, (B.READ,)),
    (R.PROMISED, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.PROMISED, J.RELEASE): (R.RETIRED, (B.RETIRE,)),
    (R.PROMISED, J.ABORT): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.PROMISED, J.GIVE_UP): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.PROMISED, J.PEER_LOST): (R.RETIRED, (B.RETIRE,)),
    (R.READING, J.ASK): (R.READING, ()),
    (R.READING, J.ACCEPT): (R.READING, ()),
    (R.READING, J.OFFER): (R.READING, ()),
    (R.READING, J.READ): (R.RELEASING, (B.RELEASE,)),
    (R.READING, J.READ_FAILED): (R.STOPPING, (B.STOP,)),
    (R.READING, J.FAIL): (R.STOPPING, (B.STOP,)),
    (R.READING, J.RELEASE): (R.STOPPING, (B.STOP,)),
    (R.READING, J.ABORT): (R.STOPPING, (B.STOP,)),
    (R.READING, J.GIVE_UP): (R.STOPPING, (B.STOP,)),
    (R.READING, J.PEER_LOST): (R.SEVERED, (B.SEVER,)),
    (R.RELEASING, J.ASK): (R.RELEASING, (B.RELEASE,)),
    (R.RELEASING, J.ACCEPT): (R.RELEASING, ()),
    (R.RELEASING, J.OFFER): (R.RELEASING, ()),
    (R.RELEASING, J.COMPLETE): (R.RETIRED, (B.RETIRE,)),
    (R.RELEASING, J.FAIL): (R.RETIRED, (B.RETIRE,)),
    (R.RELEASING, J.RELEASE): (R.RETIRED, (B.RETIRE,)),
    (R.RELEASING, J.ABORT): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.RELEASING, J.GIVE_UP): (R.RETIRED, (B.RETIRE,)),
    (R.RELEASING, J.PEER_LOST): (R.RETIRED, (B.RETIRE,)),
    (R.CANCELLING, J.ASK): (R.CANCELLING, (B.CANCEL,)),
    (R.CANCELLING, J.OFFER): (R.CANCELLING, ()),
    (R.STOPPING, J.STOPPED): (R.CANCELLING, (B.FREE, B.CANCEL)),
    (R.STOPPING, J.ASK): (R.STOPPING, ()),
    (R.STOPPING, J.ACCEPT): (R.STOPPING, ()),
    (R.STOPPING, J.OFFER): (R.STOPPING, ()),
    (R.STOPPING, J.READ_FAILED): (R.STOPPING, ()),
    (R.STOPPING, J.FAIL): (R.STOPPING, ()),
    (R.STOPPING, J.RELEASE): (R.STOPPING, ()),
    (R.STOPPING, J.ABORT): (R.STOPPING, ()),
    (R.STOPPING, J.PEER_LOST): (R.SEVERED, (B.SEVER,)),
    (R.SEVERED, J.ASK): (R.SEVERED, ()),
    (R.SEVERED, J.ACCEPT): (R.SEVERED, ()),
    (R.SEVERED, J.OFFER): (R.SEVERED, ()),
    (R.SEVERED, J.READ_FAILED): (R.SEVERED, ()),
    (R.SEVERED, J.STOPPED): (R.SEVERED, ()),
    (R.SEVERED, J.FAIL): (R.SEVERED, ()),
    (R.SEVERED, J.RELEASE): (R.SEVERED, ()),
    (R.SEVERED, J.ABORT): (R.SEVERED, ()),
    (R.SEVERED, J.PEER_LOST): (R.SEVERED, ()),
    (R.SEVERED, J.SAFE): (R.RETIRED, (B.RETIRE,)),
}
