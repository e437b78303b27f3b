"""The simulated data plane: real bytes, moved when the test says so, also after their sender has died."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpush.core.effects import Post, PostRead
from kvpush.core.ids import Key, PeerName
from kvpush.core.messages import decode_notice

if TYPE_CHECKING:
    from core.process import Process
    from core.world import World

WRITE_S = 0.01


@dataclass(eq=False)
class Write:
    """One posted operation, a READ as well as a WRITE. In flight until it has landed or failed; a moment later that is
    reported to who posted it."""

    source: "Process"
    destination: "Process"
    post: Post | PostRead
    belongs_to: Key | None
    posted_at: float
    in_flight: bool = True
    is_reported: bool = False

    @property
    def key(self) -> Key:
        """The transfer that it belongs to."""
        assert self.belongs_to is not None
        return self.belongs_to

    @property
    def notice(self) -> bytes:
        """What a WRITE brings along."""
        assert isinstance(self.post, Post)
        return self.post.notice

    @property
    def blocks(self) -> set[int]:
        """Where it lands."""
        plan = self.post.plan
        landing = plan.local if isinstance(self.post, PostRead) else plan.remote
        return self.destination.memory.blocks_of(landing, plan.nbytes)

    @property
    def poster(self) -> "Process":
        """Who is told of its end."""
        return self.destination if isinstance(self.post, PostRead) else self.source

    @property
    def peer(self) -> "Process":
        """The other one."""
        return self.source if isinstance(self.post, PostRead) else self.destination


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
        for write in [w for w in self.in_flight if w.poster is source and w.peer is peer]:
            self.fail(write, "the peer was removed")

    def queue(self, source: "Process", post: Post | PostRead) -> None:
        """Post as soon as the driver comes to it, if the endpoint still wants it then."""
        delay = self.queueing(source)
        if delay:
            self._world.after(delay, lambda: source.input(lambda now: self._post_late(source, post, now)))
        else:
            source.input(lambda now: self._post_late(source, post, now))

    def _post_late(self, source: "Process", post: Post | PostRead, now: float) -> None:
        if source.endpoint.may_post(post.op, now):
            self._post(source, post)
        else:
            source.endpoint.op_finished(post.op, "not posted", now)

    def _post(self, source: "Process", post: Post | PostRead) -> None:
        peer = source.peers.get(post.peer)
        write = _made(source, peer or source, post, self._world.now)
        error = self.refuses(write) if peer is not None else f"there is no peer {post.peer}"
        if error:
            source.input(lambda now: source.endpoint.op_finished(post.op, error, now))
            return
        if isinstance(post, Post):
            self._world.oracle.check_post(write)
        self.writes.append(write)
        if not self.holding(write):
            self._world.after(WRITE_S, lambda: self.land(write))

    def land(self, write: Write) -> None:
        """The bytes arrive, the sender sees that it is done, and the notice follows."""
        if not write.in_flight:
            return
        write.in_flight = False
        if write.destination.alive and not (write.poster is write.destination and not write.source.alive):
            self._world.oracle.check_landing(write)
            self._copy(write)
            self._notify(write)
        self._report(write, "" if write.peer.alive else "the peer is gone")

    def fail(self, write: Write, error: str) -> None:
        """The transport gives a write up: nothing of it will land any more."""
        if write.in_flight:
            write.in_flight = False
            self._report(write, error)

    def _copy(self, write: Write) -> None:
        plan = write.post.plan
        local, remote = plan.local.tolist(), plan.remote.tolist()
        sources, targets = (remote, local) if isinstance(write.post, PostRead) else (local, remote)
        for source, target, nbytes in zip(sources, targets, plan.nbytes.tolist(), strict=True):
            write.destination.memory.write(target, write.source.memory.read(source, nbytes))

    def _notify(self, write: Write) -> None:
        if isinstance(write.post, PostRead):
            return
        delay, peer, notice = self.notice_delay(write), write.destination, write.post.notice
        if delay is not None:
            arrive = lambda: peer.input(lambda now: peer.endpoint.notice_received(notice, now))  # noqa: E731
            self._world.after(delay, arrive)

    def _report(self, write: Write, error: str) -> None:
        def finish(now: float) -> None:
            write.is_reported = True
            write.poster.endpoint.op_finished(write.post.op, error, now)

        self._world.after(0.0, lambda: write.poster.input(finish))


def _made(poster: "Process", peer: "Process", post: Post | PostRead, now: float) -> Write:
    if isinstance(post, Post):
        return Write(poster, peer, post, decode_notice(post.notice).key, now)
    touched = poster.memory.blocks_of(post.plan.local, post.plan.nbytes)
    owner = next((key for key, each in poster.destinations.items() if touched <= set(each.blocks[0])), None)
    return Write(peer, poster, post, owner, now)
