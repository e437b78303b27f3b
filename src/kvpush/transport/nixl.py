"""The data plane on NIXL: one agent, owned by one thread.

What was measured (NIXL 1.5.1, UCX, two processes on one host of two cores without a NIC), and what follows:

Descriptors. For 10,240 of 4 KiB, `initialize_xfer` with numpy rows takes 0.2 to 0.6 ms; `prep_xfer_dlist` and
`make_prepped_xfer` take 0.5 to 1.9 ms and leave lists to look after. So each operation is made whole and released.

Progress. Nothing moves by itself. Over TCP no byte of a write lands while its receiver does not poll; over
shared memory (CMA) the bytes land inside of `post_write`, but the write is not done, nor its notice seen, before
the receiver polls. Hence the receiver must poll from the time that a write is posted (the `Writing` hint).
NIXL's progress thread would do that, at the price of a whole core per process even when idle: it stays off.

Time. CMA: 41 MB in 10,240 descriptors hold the caller for 19 ms (without the GIL). `UCX_TLS=tcp`: post 3 to 14 ms,
then 35 to 60 ms on the wire. An idle poll takes 5 to 15 us.

Dead peers. A killed process is noticed at once, and NIXL then drops the peer by itself. A stopped one is never
noticed. One behind a cut network is not noticed by UCX's own keepalive while data is unacknowledged (nothing in
170 s); `UCX_TCP_USER_TIMEOUT` bounds that (4 s gave an error after 4.2 s), so it is set to `TCP_TIMEOUT` unless
the environment has it. NICs have their own bounds (`UCX_RC_TIMEOUT`, `UCX_RC_RETRY_COUNT`).

Late bytes. `remove_peer` ends a write here, and its source may be used again, but what the kernel had taken (7 of
34 MB) still landed in a stopped receiver when it went on. Over CMA a write that is reported as failed may have
landed as a whole. A receiver cannot close its way in: neither removing the sender nor, over CMA, closing its own
transport stopped a write. That is what the quarantine is for (R1).
"""

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpush.core.errors import TransportError
from kvpush.core.ids import OpId, PeerName
from kvpush.core.layout import MEMORY_KINDS, Region
from kvpush.core.planner import Plan
from kvpush.transport.areas import Areas
from kvpush.transport.base import NoticeArrived, OpDone, TransportEvent
from kvpush.transport.owner import Owner

TCP_TIMEOUT = "10s"
"""How long UCX lets sent bytes go unacknowledged on TCP; must be shorter than `ProtocolConfig.quarantine_s`."""

DEFAULT_BACKENDS: Mapping[str, Mapping[str, str]] = {"UCX": {}}


class _Metadata(msgspec.Struct, frozen=True):
    """NIXL's own metadata says nothing of devices, which its descriptors need."""

    agent: str
    memory: str
    regions: tuple[Region, ...]
    nixl: bytes


@dataclass(frozen=True, eq=False)
class _Peer:
    agent: str
    memory: str
    areas: Areas


@dataclass(eq=False)
class _Posted:
    """A posted write or read. With `error` set it only waits for NIXL to let go of its handle."""

    op: OpId
    peer: PeerName
    handle: Any
    error: str = ""


@dataclass(eq=False)
class _State:
    """All that `close` drops."""

    agent: Any
    peers: dict[PeerName, _Peer] = field(default_factory=dict)
    posted: dict[OpId, _Posted] = field(default_factory=dict)
    done: list[TransportEvent] = field(default_factory=list)
    registered: Any = None


class NixlTransport:
    """A `Transport` on stock NIXL."""

    def __init__(self, name: str, backends: Mapping[str, Mapping[str, str]] = DEFAULT_BACKENDS) -> None:
        """`name` must differ from every peer's. `backends` maps the NIXL backends to make to their
        parameters, in NIXL's own words. UCX reads its settings (`UCX_TLS` and others) from the environment.

        Raises `TransportError` when NIXL is not installed or lacks a backend.
        """
        self._owner = Owner()
        self._name = name
        self._open: _State | None = _State(_make_agent(name, backends))
        self._metadata = b""
        self._memory = ""
        self._areas = Areas(())

    @property
    def metadata(self) -> bytes:
        """Agent name, regions and NIXL's own metadata, as MessagePack."""
        self._state("metadata")
        return self._metadata

    def register(self, regions: tuple[Region, ...], memory: str) -> None:
        """Pin `regions` with every backend that can reach them."""
        state = self._state("register")
        if memory not in MEMORY_KINDS:
            raise TransportError(f"memory '{memory}' is none of {', '.join(MEMORY_KINDS)}")
        areas = Areas(regions)
        rows = np.array([(region.base, region.nbytes, region.device) for region in regions], np.uint64)
        with _mapped(f"registering {len(regions)} regions of {memory} memory"):
            state.registered = state.agent.register_memory(rows, memory.upper())
            blob = state.agent.get_agent_metadata()
        self._memory, self._areas = memory, areas
        self._metadata = msgspec.msgpack.encode(_Metadata(self._name, memory, regions, blob))

    def add_peer(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer's metadata and begin to connect to it."""
        state = self._state("add_peer")
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise TransportError(f"{peer}: its transport metadata cannot be read: {error}") from None
        areas = Areas(theirs.regions)
        self.remove_peer(peer)
        for other, known in state.peers.items():
            if known.agent == theirs.agent:
                raise TransportError(f"{peer}: its agent {theirs.agent} is loaded as {other} already")
        with _mapped(f"loading peer {peer}"):
            agent = state.agent.add_remote_agent(theirs.nixl).decode()
            state.peers[peer] = _Peer(agent, theirs.memory, areas)
            state.agent.make_connection(agent)

    def remove_peer(self, peer: PeerName) -> None:
        """Give up what is in flight to or from a peer, and disconnect from it."""
        state = self._state("remove_peer")
        known = state.peers.pop(peer, None)
        if known is None:
            return
        for posted in [each for each in state.posted.values() if each.peer == peer]:
            posted.error = posted.error or f"peer {peer} was removed"
            self._let_go(state, posted)
        with _mapped(f"removing peer {peer}"):
            state.agent.remove_remote_agent(known.agent)

    def post_write(self, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        """Start a write. Over shared memory all bytes are copied in here (with the GIL released)."""
        state = self._state("post_write")
        target = _known(state, peer)
        if plan.descriptors:
            self._post(state, "WRITE", op, peer, plan, notice)
        else:
            self._notify(state, op, target, notice)

    def post_read(self, op: OpId, peer: PeerName, plan: Plan) -> None:
        """Start a read. Over shared memory all bytes are copied in here (with the GIL released)."""
        state = self._state("post_read")
        _known(state, peer)
        if plan.descriptors:
            self._post(state, "READ", op, peer, plan, b"")
        else:
            state.done.append(OpDone(op))

    def _post(self, state: _State, what: str, op: OpId, peer: PeerName, plan: Plan, notice: bytes) -> None:
        other = state.peers[peer]
        with _mapped(f"preparing a {what} of {plan.descriptors} descriptors with {peer}"):
            handle = state.agent.initialize_xfer(
                what,
                self._descriptors(state, plan.local, plan.nbytes, self._areas, self._memory),
                self._descriptors(state, plan.remote, plan.nbytes, other.areas, other.memory),
                other.agent,
                notice,
            )
        posted = state.posted[op] = _Posted(op, peer, handle)
        try:
            state.agent.transfer(handle, notice)
        except Exception as error:  # some of it may have been done: that is a failed operation, not a refused one
            posted.error = _text(error)

    def poll(self) -> list[TransportEvent]:
        """Let NIXL work, then collect."""
        state = self._state("poll")
        for posted in list(state.posted.values()):
            self._advance(state, posted)
        with _mapped("asking for notices"):
            arrived = state.agent.get_new_notifs()
        events = [*state.done, *(NoticeArrived(each) for notices in arrived.values() for each in notices)]
        state.done.clear()
        return events

    def close(self) -> None:
        """Let go of handles, peers and memory. Errors are ignored: there is nobody left to act on them."""
        self._owner.check("close")
        state, self._open = self._open, None
        if state is None:
            return
        for posted in state.posted.values():
            with suppress(Exception):
                posted.handle.release()
        for peer in state.peers.values():
            with suppress(Exception):
                state.agent.remove_remote_agent(peer.agent)
        if state.registered is not None:
            with suppress(Exception):
                state.agent.deregister_memory(state.registered)

    def _state(self, what: str) -> _State:
        self._owner.check(what)
        if self._open is None:
            raise TransportError(f"{what}: the transport is closed")
        return self._open

    def _descriptors(
        self, state: _State, addresses: NDArray[np.int64], nbytes: NDArray[np.int64], areas: Areas, memory: str
    ) -> Any:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, areas.devices(addresses)
        return state.agent.get_xfer_descs(rows, memory.upper())

    def _notify(self, state: _State, op: OpId, target: _Peer, notice: bytes) -> None:
        if notice:
            with _mapped("sending a notice"):
                state.agent.send_notif(target.agent, notice)
        state.done.append(OpDone(op))

    def _advance(self, state: _State, posted: _Posted) -> None:
        if not posted.error:
            try:
                progress = state.agent.check_xfer_state(posted.handle)
                if progress == "PROC":
                    return
                posted.error = "" if progress == "DONE" else f"NIXL reports {progress}"
            except Exception as error:
                posted.error = _text(error)
        self._let_go(state, posted)

    def _let_go(self, state: _State, posted: _Posted) -> None:
        """Release a handle; if NIXL still needs it, the next `poll` tries again."""
        try:
            posted.handle.release()
        except Exception as error:
            posted.error = posted.error or _text(error)
            return
        del state.posted[posted.op]
        state.done.append(OpDone(posted.op, posted.error))


def _known(state: _State, peer: PeerName) -> _Peer:
    if peer not in state.peers:
        raise TransportError(f"there is no peer {peer}")
    return state.peers[peer]


def _make_agent(name: str, backends: Mapping[str, Mapping[str, str]]) -> Any:
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportError(
            f"NIXL cannot be imported ({error}). Install it: pip install 'kvpush[vllm]', or pip install nixl."
        ) from error
    os.environ.setdefault("UCX_TCP_USER_TIMEOUT", TCP_TIMEOUT)  # read when the process makes its first agent
    with _mapped("making a NIXL agent"):
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        missing = sorted(set(backends) - set(agent.get_plugin_list()))
        if missing:
            known = ", ".join(sorted(agent.get_plugin_list()))
            raise TransportError(f"NIXL has no backend {', '.join(missing)} here; it has {known}")
        for backend, parameters in backends.items():
            agent.create_backend(backend, dict(parameters))
    return agent


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Turn whatever NIXL and its bindings raise into `TransportError`."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(f"{what}: {_text(error)}") from error


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
