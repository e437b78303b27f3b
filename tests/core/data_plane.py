"""The simulated data plane: real bytes, moved when the test says so, also after their sender has died."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpush.core.effects import Post
from kvpush.core.ids import Key, PeerName
from kvpush.core.messages import decode_notice

if TYPE_CHECKING:
    from core.process import Process
    from core.world import World

WRITE_S = 0.01


@dataclass(eq=False)
class Write:
    """One posted write. In flight until it has landed or failed; a moment later that is reported to its source."""

    source: "Process"
    destination: "Process"
    post: Post
    posted_at: float
    in_flight: bool = True
    is_reported: bool = False

    @property
    def key(self) -> Key:
        """The transfer that it belongs to."""
        return decode_notice(self.post.notice).key


class DataPlane:
    """All writes. By default each lands after `WRITE_S`, and its notice arrives with it.

    `holding`: writes stay in flight until `land` or `fail`. `notice_delay` says how much later than its bytes a
    notice is seen; None loses it. `queueing` says how long a driver is too busy to post. `refuses` and `peer_error`
    are why a post or a peer fails at once, "" when they do not.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.writes: list[Write] = []
        self.holding: Callable[[Write], bool] = lambda _: False
        self.notice_delay: Callable[[Write], float | None] = lambda _: 0.0
        self.refuses: Callable[[Write], str] = lambda _: ""
        self.queueing: Callable[[Process], float] = lambda _: 0.0
        self.peer_error: Callable[[Process, Process], str] = lambda _source, _peer: ""

    @property
    def in_flight(self) -> list[Write]:
        """Writes that have neither landed nor failed, oldest first."""
        return [write for write in self.writes if write.in_flight]

    def add_peer(self, source: "Process", name: PeerName, metadata: bytes) -> None:
        """Load a peer, now or never."""
        peer = next((process for process in self._world.processes if str(process.number).encode() == metadata), None)
        error = self.peer_error(source, peer) if peer is not None else "its transport metadata cannot be read"
        if peer is not None and not error:
            source.peers[name] = peer
        source.input(lambda now: source.endpoint.peer_added(name, error, now))

    def remove_peer(self, source: "Process", name: PeerName) -> None:
        """What is in flight to a removed peer is given up, and reported."""
        peer = source.peers.pop(name, None)
        for write in [w for w in self.in_flight if w.source is source and w.destination is peer]:
            self.fail(write, "the peer was removed")

    def queue(self, source: "Process", post: Post) -> None:
        """Post as soon as the driver comes to it, if the endpoint still wants it then."""
        delay = self.queueing(source)
        if delay:
            self._world.after(delay, lambda: source.input(lambda now: self._post_late(source, post, now)))
        else:
            source.input(lambda now: self._post_late(source, post, now))

    def _post_late(self, source: "Process", post: Post, now: float) -> None:
        if source.endpoint.may_post(post.op, now):
            self._post(source, post)
        else:
            source.endpoint.op_finished(post.op, "not posted", now)

    def _post(self, source: "Process", post: Post) -> None:
        peer = source.peers.get(post.peer)
        write = Write(source, peer or source, post, self._world.now)
        error = self.refuses(write) if peer is not None else f"there is no peer {post.peer}"
        if error:
            source.input(lambda now: source.endpoint.op_finished(post.op, error, now))
            return
        self._world.oracle.check_post(write)
        self.writes.append(write)
        if not self.holding(write):
            self._world.after(WRITE_S, lambda: self.land(write))

    def land(self, write: Write) -> None:
        """The bytes arrive, the sender sees that it is done, and the notice follows."""
        if not write.in_flight:
            return
        write.in_flight = False
        if write.destination.alive:
            self._world.oracle.check_landing(write)
            self._copy(write)
            self._notify(write)
        self._report(write, "" if write.destination.alive else "the peer is gone")

    def fail(self, write: Write, error: str) -> None:
        """The transport gives a write up: nothing of it will land any more."""
        if write.in_flight:
            write.in_flight = False
            self._report(write, error)

    def _copy(self, write: Write) -> None:
        plan = write.post.plan
        for local, remote, nbytes in zip(plan.local.tolist(), plan.remote.tolist(), plan.nbytes.tolist(), strict=True):
            write.destination.memory.write(remote, write.source.memory.read(local, nbytes))

    def _notify(self, write: Write) -> None:
        delay, peer, notice = self.notice_delay(write), write.destination, write.post.notice
        if delay is not None:
            arrive = lambda: peer.input(lambda now: peer.endpoint.notice_received(notice, now))  # noqa: E731
            self._world.after(delay, arrive)

    def _report(self, write: Write, error: str) -> None:
        def finish(now: float) -> None:
            write.is_reported = True
            write.source.endpoint.op_finished(write.post.op, error, now)

        self._world.after(0.0, lambda: write.source.input(finish))
