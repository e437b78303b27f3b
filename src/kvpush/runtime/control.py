"""The control channel: one listening socket, one connecting socket per link, and no waiting on any peer.

Owned by the transfer thread, which makes it, polls it and closes it. A frame goes out at once into a bounded queue,
or is dropped and counted: the protocol repeats what matters, and a peer that does not read delays no other (R7).
Bytes from strangers end at ZeroMQ's handshake; messages of a wrong shape or size end here; the endpoint parses the
rest.

Without a secret anyone may be there. Strangers are listened to for a little (see strangers.py), nobody waits while they
are not listened to, and the thread rests in between, so that the engine has its core and the interpreter.

Hosts should be IP addresses: a name is resolved by ZeroMQ's I/O thread, and while a slow resolver is asked, every
link waits.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from kvpush.core.errors import ControlError, Reason
from kvpush.core.events import Counted
from kvpush.core.ids import Address, LinkId
from kvpush.runtime.auth import Gate, derive_keys
from kvpush.runtime.dialled import Dialled, Standing
from kvpush.runtime.links import InboundLinks
from kvpush.runtime.ratelimit import RateLimit
from kvpush.runtime.sockets import (
    HANDSHAKE_FAILED,
    ControlConfig,
    Socket,
    bind,
    connection_of,
    hang_up,
    make_context,
    make_listener,
    monitor_events,
    readable,
    watch,
)
from kvpush.runtime.strangers import FRAMES_PER_TURN, TRIAL_FRAMES, Allowance
from kvpush.transport.owner import Owner

logger = logging.getLogger("kvpush.control")

_DROPS_PER_TURN = 128
"""After so many frames that nobody looks into, a turn ends."""
_EVENTS_PER_TURN = 256
_OFTEN_S, _REST_S = 0.005, 0.002
"""When strangers take turns more often than that, each ends with a rest."""
_LAST_WORDS_S = 0.1
"""So long the end of a link waits for the last frames that came on it, when there is no end of frames."""


@dataclass(frozen=True)
class FrameArrived:
    """One message of a peer, not looked into."""

    link: LinkId
    frame: bytes


@dataclass(frozen=True)
class LinkLost:
    """A connection has ended, and frames with it. A link that we opened connects again by itself; one that was
    accepted is forgotten, and its peer comes back under another."""

    link: LinkId


@dataclass(frozen=True)
class LinkRefused:
    """A link that we opened is forgotten: its address cannot be one, or the peer has another secret."""

    link: LinkId


Arrival = FrameArrived | LinkLost | LinkRefused


class ControlChannel:
    """Links to and from peers. Positive `LinkId`s are opened with `open_link`, negative ones are accepted."""

    def __init__(self, listen: Address, secret: str = "", config: ControlConfig | None = None) -> None:
        """Listen at `listen`, where port 0 picks a free port. `secret` "" lets everyone in.

        Raises `ControlError` when that is impossible, `ConfigError` for a weak secret.
        """
        self._owner = Owner()
        self._config = config or ControlConfig()
        self._dialled: dict[LinkId, Dialled] = {}
        self._inbound = InboundLinks(self._config.max_inbound)
        self._gone: list[LinkLost | LinkRefused] = []
        self._gone_since = math.inf
        self._strangers = Allowance(time.monotonic())
        self._events_left = _EVENTS_PER_TURN
        self._bothered, self._bothered_at = False, -math.inf
        self._counted: list[Counted] = []
        self._poller = zmq.Poller()
        self._warnings = RateLimit()
        keys = derive_keys(secret) if secret else None
        self._context = make_context()
        self._gate = Gate(self._context, keys)
        self._listener = make_listener(self._context, self._config)
        self._monitor = watch(self._context, self._listener, zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._gate.guard(self._listener)
        if not keys:
            logger.warning("No secret is set: whoever reaches %s can use the control channel.", listen)
        self._listen(listen)

    def _listen(self, listen: Address) -> None:
        try:
            self.address = bind(self._listener, listen)
        except ControlError:
            self.close()
            raise
        for socket in self._own_sockets():
            self._poller.register(socket, zmq.POLLIN)

    # links --------------------------------------------------------------------------------------------
    def open_link(self, link: LinkId, address: Address) -> None:
        """Begin to connect. What goes wrong, now or later, is a `LinkRefused`."""
        self._owner.check("open_link")
        try:
            dialled = Dialled(self._context, link, address, self._config, self._gate.identify)
        except (ControlError, zmq.ZMQError) as error:
            logger.warning("%s", error)
            self._gone.append(LinkRefused(link))
            return
        self._dialled[link] = dialled
        self._poller.register(dialled.dealer, zmq.POLLIN)
        self._poller.register(dialled.monitor, zmq.POLLIN)

    def close_link(self, link: LinkId) -> None:
        """Forget a link; unknown ones are ignored. Frames already sent on it may still leave. On one that was accepted,
        whoever is there is a stranger again."""
        self._owner.check("close_link")
        self._inbound.forget(link)
        dialled = self._dialled.pop(link, None)
        if dialled:
            self._poller.unregister(dialled.dealer)
            self._poller.unregister(dialled.monitor)
            dialled.close()

    def trust_link(self, link: LinkId) -> None:
        """The peer at the other end of an accepted link is known: all that it says is listened to."""
        self._owner.check("trust_link")
        self._inbound.trust(link)

    def send(self, link: LinkId, frame: bytes) -> None:
        """Send a frame, or drop and count it when the peer is gone, does not read, or would refuse its size."""
        self._owner.check("send")
        if len(frame) > self._config.max_frame_bytes:
            logger.error("A frame of %d bytes is too large to send.", len(frame))
            return self._count("control_frame_dropped", Reason.BAD_MESSAGE)
        try:
            self._send(link, frame)
        except zmq.Again:
            self._count("control_frame_dropped", Reason.PEER_SILENT)
        except zmq.ZMQError:  # an accepted link whose connection has ended
            self._count("control_frame_dropped", Reason.PEER_LOST)
            self._gone.append(LinkLost(link))

    def _send(self, link: LinkId, frame: bytes) -> None:
        if link in self._dialled:
            self._dialled[link].send(frame)
        elif identity := self._inbound.identity(link):
            self._listener.send_multipart([identity, frame], zmq.NOBLOCK)
        else:
            self._count("control_frame_dropped", Reason.PEER_LOST)

    # turns --------------------------------------------------------------------------------------------
    def wake_on(self, fd: int) -> None:
        """Let `wait` also end when `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something has arrived, or `timeout_s` (rounded up to milliseconds) has passed."""
        self._poller.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000))

    def receive(self, limit: int) -> list[Arrival]:
        """What has arrived, at most `limit` frames per socket and few of strangers; the rest stays there."""
        self._owner.check("receive")
        if readable(self._gate.socket):
            self._gate.answer()
        self._events_left = _EVENTS_PER_TURN
        self._follow_connections()
        arrived: list[Arrival] = list(self._accepted_frames(limit))
        self._rest()
        for dialled in self._dialled.values():
            messages, standing = dialled.receive(limit)
            arrived += self._frames(dialled.link, messages)
            if standing is Standing.BROKEN:
                self._gone.append(LinkLost(dialled.link))
            elif standing is Standing.REFUSED:
                self._refused(dialled)
        return arrived + self._take_gone()

    def take_counted(self) -> list[Counted]:
        """What has been dropped or refused since the last call."""
        counted, self._counted = self._counted, []
        return counted

    def close(self) -> None:
        """Close every link and socket, for at most `linger_s`. Idempotent."""
        for link in list(self._dialled):
            self.close_link(link)
        if not self._listener.closed:
            self._listener.disable_monitor()
        for socket in self._own_sockets():
            socket.close()
        self._context.term()

    # inside -------------------------------------------------------------------------------------------
    def _own_sockets(self) -> list[Socket]:
        return [self._listener, self._monitor, self._gate.socket]

    def _accepted_frames(self, limit: int) -> Iterator[FrameArrived]:
        of_peers = of_strangers = dropped = 0
        while of_peers < limit and of_strangers < min(limit, FRAMES_PER_TURN) and dropped < _DROPS_PER_TURN:
            if not readable(self._listener):
                return
            identity, *parts = self._listener.recv_multipart(zmq.NOBLOCK, copy=False)
            link = self._inbound.heard(identity.bytes) or self._accept(identity.bytes, parts)
            if link is not None and self._inbound.is_trusted(link):
                of_peers += 1
            elif link is not None and self._admits(link, sum(map(len, parts))):
                of_strangers += 1
            else:
                dropped += 1
                continue
            yield from self._frames(link, [[part.bytes for part in parts]])

    def _admits(self, link: LinkId, nbytes: int) -> bool:
        """Whether a stranger is listened to."""
        self._bothered = True
        heard = self._inbound.count_frame(link)
        if heard > TRIAL_FRAMES:  # what it has sent already still comes
            if heard == TRIAL_FRAMES + 1:
                self._count("control_stranger_closed", Reason.BAD_MESSAGE)
                hang_up(self._inbound.fd(link), self.address.port)
            return False
        if not self._strangers.admits(nbytes, time.monotonic()):
            self._count("control_stranger_ignored", Reason.BAD_MESSAGE)
            return False
        return True

    def _rest(self) -> None:
        """Let others run when strangers ask for turn after turn; what they have sent waits, and so do they."""
        now = time.monotonic()
        bothered, self._bothered = self._bothered, False
        if bothered and now < self._bothered_at + _OFTEN_S:
            time.sleep(_REST_S)
        if bothered:
            self._bothered_at = now

    def _accept(self, identity: bytes, parts: list[zmq.Frame]) -> LinkId | None:
        """A peer's first message. The number of its connection may be that of one which has just ended; None for a peer
        of a ZeroMQ too old to have one, which could not be followed."""
        self._follow_connections()
        fd = connection_of(parts[0])
        if fd is None:
            self._bothered = True
            self._count("control_message_refused", Reason.BAD_MESSAGE)
            return None
        self._gone += map(LinkLost, self._inbound.make_room(fd))
        return self._inbound.accept(identity, fd)

    def _frames(self, link: LinkId, messages: list[list[bytes]]) -> Iterator[FrameArrived]:
        for message in messages:
            if len(message) == 1:
                yield FrameArrived(link, message[0])
            else:
                self._count("control_message_refused", Reason.BAD_MESSAGE)

    def _follow_connections(self) -> None:
        happened = monitor_events(self._monitor, self._events_left)
        self._events_left -= len(happened)
        for event, value in happened:
            link = None if event & HANDSHAKE_FAILED else self._inbound.on_connection(value)
            self._bothered = self._bothered or link is None or not self._inbound.is_trusted(link)
            if event & HANDSHAKE_FAILED:
                self._count("control_handshake_failed", Reason.PEER_HANDSHAKE)
            elif link is not None:
                self._gone.append(LinkLost(link))

    def _refused(self, dialled: Dialled) -> None:
        self._gone.append(LinkRefused(dialled.link))
        if self._warnings.allows(str(dialled.address), time.monotonic()):
            logger.warning("%s does not let us in. Do both sides have the same secret?", dialled.address)

    def _take_gone(self) -> list[Arrival]:
        """Links that are gone, each once; not before the last frames of accepted ones have been read, but soon."""
        now = time.monotonic()
        self._gone_since = min(self._gone_since, now) if self._gone else math.inf
        if readable(self._listener) and now < self._gone_since + _LAST_WORDS_S:
            return []
        gone, self._gone, self._gone_since = list(dict.fromkeys(self._gone)), [], math.inf
        for each in gone:
            if isinstance(each, LinkRefused) or each.link < 0:
                self.close_link(each.link)
        return list(gone)

    def _count(self, name: str, reason: Reason) -> None:
        self._counted.append(Counted(name, reason))
