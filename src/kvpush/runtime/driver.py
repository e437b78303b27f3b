"""The loop of the transfer thread: inputs to the endpoint, its effects to the transport and the control channel.

Each turn does a bounded amount of work: at most so many commands and frames, and effects until their time is up.
A post may take tens of milliseconds (a same-host transport copies inside it), so a long list of them is carried out
over several turns, with frames and completions in between.

The thread may have been stopped anywhere for any time (SIGSTOP, a debugger, a suspended machine), while writes move
bytes in posts and polls only. So right before each of these, time is let pass and lost peers are removed: a write whose
lease ended in the meantime moves no more, but for the one call in which the thread was stopped.

Nor does a machine that is short of CPU let the thread run when it should. Peers are therefore judged only after the
sockets have been read, and a sender that is to answer gets back the time in which nobody was there to hear it.

One input that finds a bug ends neither the turn nor the thread: the traceback is logged and the loop goes on.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, Protocol

from kvpush.core.commands import Command, Stop
from kvpush.core.effects import AddPeer, CloseLink, Effect, OpenLink, Post, PostRead, RemovePeer, SendFrame, TrustLink
from kvpush.core.endpoint import Endpoint
from kvpush.core.errors import LocalProtocolError, Reason, TransportError
from kvpush.core.events import Counted, Event, Stopped
from kvpush.core.ids import Address, LinkId
from kvpush.runtime.control import Arrival, FrameArrived, LinkLost, LinkRefused
from kvpush.runtime.local import ThreadEnd
from kvpush.runtime.mailbox import Mailbox
from kvpush.runtime.ratelimit import RateLimit
from kvpush.runtime.records import TransferLog
from kvpush.runtime.refusals import instead
from kvpush.transport.base import OpDone, Transport, TransportEvent

logger = logging.getLogger("kvpush.transfer")

P = ParamSpec("P")

COMMANDS_PER_TURN = 256
FRAMES_PER_TURN = 128
EFFECTS_S = 0.002
"""Effects are carried out until this much time has passed; the one that runs then is finished."""
LATE_S = 0.1
"""A thread that runs so much later than it meant to has stood still."""
SLOW_S = 0.2
"""One effect that takes longer is warned of."""
STOP_GRACE_S = 0.5
"""An endpoint reports `Stopped` by itself within its `stop_s`; later than that it has a bug, and is left."""
_BROKEN_TURN_S = 0.01
"""What fails in each turn must not fail a hundred thousand times a second."""


class Pace:
    """How long to wait between two polls of the transport.

    A poll costs some microseconds and, worse, the GIL. So the wait grows with the time that nothing has happened:
    what took t to happen is seen at most t/16 late, and never later than `SLOWEST_S`.
    """

    SLOWEST_S = 0.001
    RARE_S = 0.05
    """Between polls while nothing is known to be in flight, but a transfer is open: its hint may have been lost, and a
    connection that is being set up needs both sides' polls."""
    AFTERGLOW_S = 1.0
    """How long such rare polls go on after the last thing that happened: what has left us may still need a push."""

    def __init__(self, fastest_s: float) -> None:
        self._fastest_s = fastest_s
        self._since = float("-inf")

    def happened(self, now: float) -> None:
        """Something was posted, has finished or has arrived: look often again."""
        self._since = now

    def wait_s(self, now: float) -> float:
        """How long to wait before the next poll."""
        return max(self._fastest_s, min(self.SLOWEST_S, (now - self._since) / 16))

    def glows(self, now: float) -> bool:
        """Whether something has happened not long ago."""
        return now < self._since + self.AFTERGLOW_S


class Channel(Protocol):
    """The control channel, as `ControlChannel` describes it."""

    def wake_on(self, fd: int) -> None:
        """Let `wait` also end when `fd` is readable."""

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something has arrived."""

    def receive(self, limit: int) -> list[Arrival]:
        """What has arrived."""

    def take_counted(self) -> list[Counted]:
        """What has been dropped or refused since the last call."""

    def open_link(self, link: LinkId, address: Address) -> None:
        """Begin to connect."""

    def close_link(self, link: LinkId) -> None:
        """Forget a link."""

    def trust_link(self, link: LinkId) -> None:
        """The endpoint knows the peer at the other end."""

    def send(self, link: LinkId, frame: bytes) -> None:
        """Send a frame, or drop it."""


class Driver:
    """Runs an endpoint until it has stopped. Used by the transfer thread only."""

    def __init__(
        self,
        endpoint: Endpoint,
        transport: Transport,
        channel: Channel,
        mailbox: Mailbox,
        *,
        poll_s: float,
        stop_s: float,
        local: ThreadEnd | None = None,
        localize: Callable[[Command], Command] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`local` hears from an engine's scheduler what else comes with its steps, and tells it at once what `mailbox`
        tells its worker. `localize` makes of their commands what they mean here. `clock` gives seconds, and never goes
        back."""
        self.turns = 0
        self._endpoint = endpoint
        self._transport = transport
        self._channel = channel
        self._mailbox = mailbox
        self._stop_s = stop_s
        self._local = local
        self._localize = localize
        self._clock = clock
        self._pace = Pace(poll_s)
        self._due = 0
        self._turned_at = self._read_at = clock()
        self._put_off = False
        self._effects: deque[Effect] = deque()
        self._stop_by: float | None = None
        self._stopped = False
        self._own_events: list[Event] = []
        self._log = TransferLog()
        self._warnings = RateLimit()
        channel.wake_on(mailbox.wake_fd)
        if local is not None:
            channel.wake_on(local.wake_fd)

    def run(self) -> None:
        """Take turns until `Stop` has been carried out."""
        try:
            while not self._stopped:
                self.turn()
                if not self._guard(self._sleep):
                    time.sleep(_BROKEN_TURN_S)
        finally:
            self._log.close()

    def turn(self) -> None:
        """Take in what has come, and do what follows from it."""
        self.turns += 1
        steps = (
            self._notice_absence,
            self._take_commands,
            self._take_frames,
            self._carry_out,  # before the poll: a post need not wait for it, and it may find the post done
            self._take_completions,
            self._pass_time,
            self._carry_out,
            self._publish,
        )
        broken = [step for step in steps if not self._guard(step)]
        if broken:
            time.sleep(_BROKEN_TURN_S)

    # inputs -------------------------------------------------------------------------------------------
    def _notice_absence(self) -> None:
        """How long the earliest deadline has been over is how long the thread has not run."""
        now = self._clock()
        was_away, self._turned_at = now - self._turned_at > LATE_S, now
        due = self._endpoint.next_deadline() if was_away else None
        if due is not None and now - due > LATE_S:
            self._endpoint.overslept(now - due)

    def _take_commands(self) -> None:
        """What was said directly before a step was, is carried out before it: so the mailbox is looked into first."""
        with_steps = self._mailbox.take(COMMANDS_PER_TURN)
        directly = self._local.take() if self._local is not None else []
        for command in (*directly, *with_steps):
            if isinstance(command, Stop):
                self._stop_by = self._clock() + self._stop_s + STOP_GRACE_S
            for ours in self._made_ours(command):
                self._guard(self._endpoint.execute, ours, self._clock())

    def _made_ours(self, command: Command) -> list[Command]:
        """A command as it has to be carried out here, or what is to be done instead when it cannot be read."""
        if self._localize is None:
            return [command]
        try:
            return [self._localize(command)]
        except Exception as error:
            self._report("localize", error)
            answers, commands = instead(command, repr(error))
            self._own_events += answers
            return commands

    def _take_frames(self) -> None:
        self._read_at = self._clock()
        for arrived in self._channel.receive(FRAMES_PER_TURN):
            match arrived:
                case FrameArrived(link, frame):
                    self._guard(self._endpoint.frame_received, link, frame, self._clock())
                case LinkLost(link):
                    self._guard(self._endpoint.link_lost, link, self._clock())
                case LinkRefused(link):
                    self._guard(self._endpoint.link_refused, link, self._clock())

    def _take_completions(self) -> None:
        self._fence()
        if self._poll_wait_s(self._clock()) is not None:
            for happened in self._transport.poll():
                self._pace.happened(self._clock())
                self._guard(self._complete, happened)

    def _complete(self, happened: TransportEvent) -> None:
        if isinstance(happened, OpDone):
            self._endpoint.op_finished(happened.op, happened.error, self._clock())
        else:
            self._endpoint.notice_received(happened.notice, self._clock())

    def _fence(self) -> None:
        """Let leases end, and close the way to lost peers before whatever else waits to be carried out."""
        self._endpoint.expire(self._clock())
        self._effects.extend(self._endpoint.take_effects())
        for effect in self._effects:
            if isinstance(effect, RemovePeer):  # stays in its place too: the peer may be about to be added
                self._guard(self._transport.remove_peer, effect.peer)

    def _pass_time(self) -> None:
        """Judge peers. When the sockets were read long ago, by now, the next turn does it, which comes at once."""
        now = self._clock()
        self._put_off = now - self._read_at > LATE_S and not self._put_off
        if self._put_off:
            self._endpoint.expire(now)
        else:
            self._endpoint.tick(now)

    def _poll_wait_s(self, now: float) -> float | None:
        """How long to wait between polls of the transport; None while it cannot have anything to tell."""
        due = self._endpoint.ops_in_flight + self._endpoint.notices_due
        if due > self._due:  # a peer has said that something is under way
            self._pace.happened(now)
        self._due = due
        if due:
            return self._pace.wait_s(now)
        return Pace.RARE_S if self._endpoint.transfers or self._pace.glows(now) else None

    # outputs ------------------------------------------------------------------------------------------
    def _carry_out(self) -> None:
        """Effects in their order; what has no time in this turn stays for the next."""
        until = self._clock() + EFFECTS_S
        self._effects.extend(self._endpoint.take_effects())
        now = self._clock()
        while self._effects and now < until:
            effect, began = self._effects.popleft(), now
            self._guard(self._apply, effect)
            self._effects.extend(self._endpoint.take_effects())
            now = self._clock()
            self._warn_if_slow(type(effect).__name__, now - began, now)

    def _warn_if_slow(self, what: str, took_s: float, now: float) -> None:
        """Nothing here should wait for a peer; what does, delays every transfer, and must be known."""
        if took_s > SLOW_S and self._warnings.allows(what, now):
            logger.warning("%s took %.0f ms, in which this thread did nothing else", what, took_s * 1000)

    def _apply(self, effect: Effect) -> None:
        match effect:
            case SendFrame(link, frame):
                self._channel.send(link, frame)
            case Post() | PostRead():
                self._post(effect)
            case AddPeer():
                self._add_peer(effect)
            case RemovePeer(peer):
                self._transport.remove_peer(peer)
            case OpenLink(link, address):
                self._channel.open_link(link, address)
            case CloseLink(link):
                self._channel.close_link(link)
            case TrustLink(link):
                self._channel.trust_link(link)

    def _post(self, post: Post | PostRead) -> None:
        self._fence()
        if not self._endpoint.may_post(post.op, self._clock()):
            self._endpoint.op_finished(post.op, "its transfer ended before it was posted", self._clock())
            return
        if isinstance(post, Post):
            error = self._attempt(self._transport.post_write, post.op, post.peer, post.plan, post.notice)
        else:
            error = self._attempt(self._transport.post_read, post.op, post.peer, post.plan)
        self._pace.happened(self._clock())
        if error:
            self._endpoint.op_finished(post.op, error, self._clock())

    def _add_peer(self, effect: AddPeer) -> None:
        error = self._attempt(self._transport.add_peer, effect.peer, effect.metadata)
        self._endpoint.peer_added(effect.peer, error, self._clock())

    def _attempt(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> str:
        """Call the transport; "" or why it could not. The endpoint must hear of it even when that is a bug."""
        try:
            call(*args, **kwargs)
            return ""
        except TransportError as error:
            return str(error) or "the transport refused without a reason"
        except Exception as error:
            self._report(call.__name__, error)
            return f"internal error: {error!r}"

    def _publish(self) -> None:
        own, self._own_events = self._own_events, []
        events = _summed([*self._endpoint.take_events(), *self._channel.take_counted(), *own])
        self._mailbox.publish(events)
        if events and self._local is not None:
            self._guard(self._local.send, events)
        now = self._clock()
        for event in events:
            self._log.record(event, now)
        overdue = self._stop_by is not None and now >= self._stop_by
        if overdue:
            logger.error("Transfers have not ended %.1f s after the stop: they are abandoned.", self._stop_s)
        self._stopped = overdue or any(isinstance(event, Stopped) for event in events)

    # in between ---------------------------------------------------------------------------------------
    def _sleep(self) -> None:
        """Until a frame, a command, the next deadline, or the next poll when something is in flight.

        Short waits end with the clock alone: ZeroMQ counts in milliseconds.
        """
        wait_s = self.wait_s()
        if wait_s is not None and wait_s <= 0:
            return
        if wait_s is not None and wait_s < Pace.SLOWEST_S:
            time.sleep(wait_s)
        elif self._mailbox.fall_asleep():
            self._channel.wait(wait_s)
            self._mailbox.wake_up()

    def wait_s(self) -> float | None:
        """How long the next turn can wait, unless a frame or a command comes; None for ever."""
        if self._effects or self._stopped:
            return 0.0
        now = self._clock()
        waits = [wait for wait in (self._until_deadline(now), self._poll_wait_s(now)) if wait is not None]
        return min(waits, default=None)

    def _until_deadline(self, now: float) -> float | None:
        deadlines = [due for due in (self._endpoint.next_deadline(), self._stop_by) if due is not None]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _guard(self, step: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Do one step; a bug in it is logged and counted, and costs only this step (False)."""
        try:
            step(*args, **kwargs)
            return True
        except Exception as error:
            self._report(step.__name__, error)
            return False

    def _report(self, step: str, error: Exception) -> None:
        if isinstance(error, LocalProtocolError):  # counted by the endpoint, which has answered it
            if self._warnings.allows(error.reason, self._clock()):
                logger.warning("kvpush does not do what a request asks for: %s", error)
            return
        self._own_events.append(Counted("step_failed", Reason.INTERNAL))
        if self._warnings.allows(type(error).__name__, self._clock()):
            logger.error("A bug in kvpush: %s failed", step, exc_info=error)


def _summed(events: list[Event]) -> list[Event]:
    """The same, but each counter once: a peer's nonsense must not become work for the engine."""
    sums: dict[tuple[str, Reason], int] = {}
    others: list[Event] = []
    for event in events:
        if isinstance(event, Counted):
            sums[event.name, event.reason] = sums.get((event.name, event.reason), 0) + event.amount
        else:
            others.append(event)
    return [*others, *(Counted(name, reason, amount) for (name, reason), amount in sums.items())]
