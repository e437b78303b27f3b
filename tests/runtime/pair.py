"""A side in a process of its own: NIXL and a transfer thread, no vLLM. It can be killed, stopped and started again."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

from runtime.rig import until
from runtime.side import BRISK, Side, answers

from kvpush.core.commands import Command
from kvpush.core.config import ProtocolConfig
from kvpush.core.events import Event, ReceiveEnded, SourceFree
from kvpush.core.ids import Address, Key
from kvpush.core.layout import Span
from kvpush.transport.nixl import NixlTransport

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([__name__, "nixl._api"])
_REPLY_S = 120.0
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2


class RemoteSide:
    """A `Side` in a child process, which starts by itself while others do.

    Each call waits for the child's answer; a child that is gone or does not answer fails the test.
    """

    def __init__(
        self,
        name: str,
        listen: Address | None = None,
        secret: str = "",
        protocol: ProtocolConfig = BRISK,
        ucx_tls: str = "",
        environment: Mapping[str, str] | None = None,
        netns: str = "",
    ) -> None:
        """`listen` None picks a free port. `ucx_tls` "" lets UCX choose; "tcp" makes it post asynchronously. `netns` is
        the network namespace to live in."""
        self._connection, theirs = _SERVER.Pipe()
        environment = {**(environment or {}), **({"UCX_TLS": ucx_tls} if ucx_tls else {})}
        self._process = _SERVER.Process(
            target=_serve, args=(theirs, name, listen, secret, protocol, environment, netns), daemon=True
        )
        self._process.start()
        theirs.close()
        self.events: list[Event] = []

    @cached_property
    def address(self) -> Address:
        """Where it listens; the first use waits until it does."""
        address: Address = self._reply()
        return address

    # the side's own methods, see `Side` ---------------------------------------------------------------
    def fill(self, seed: int) -> None:
        self._call("fill", seed)

    def tokens(self, span: Span, blocks: tuple[int, ...]) -> bytes:
        content: bytes = self._call("tokens", span, blocks)
        return content

    def submit(self, *commands: Command) -> None:
        self._call("submit", *commands)

    def drain(self) -> list[Event]:
        self.events = self._call("drain")
        return self.events

    def stop(self) -> list[Event]:
        self.events = self._call("stop")
        return self.events

    def turns(self) -> int:
        turns: int = self._call("turns")
        return turns

    # the process --------------------------------------------------------------------------------------
    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """SIGKILL: nothing is said to anyone."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def freeze(self) -> None:
        """SIGSTOP: it neither reads nor writes until `thaw`."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process, whatever its state. Idempotent."""
        if self.alive:
            self.kill()
        self._connection.close()

    def _call(self, method: str, *args: object) -> Any:
        assert self.address
        self._connection.send((method, args))
        return self._reply()

    def _reply(self) -> Any:
        assert self._connection.poll(_REPLY_S), "the child does not answer"
        reply = self._connection.recv()
        if isinstance(reply, BaseException):
            raise reply
        return reply


def _serve(
    connection: Connection,
    name: str,
    listen: Address | None,
    secret: str,
    protocol: ProtocolConfig,
    environment: Mapping[str, str],
    netns: str,
) -> None:
    """The child: obey until the parent is gone."""
    os.environ.update(environment)
    if netns:
        _enter(netns)
    side = Side(name, lambda: NixlTransport(f"{name}-{os.getpid()}"), secret, protocol)
    if listen:
        side.listen_on(listen)
    _answer(connection, side, "start", ())
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, ConnectionError):
            return
        _answer(connection, side, method, args)


def _enter(netns: str) -> None:
    """As `ip netns exec` does it: UCX reads in /sys which devices there are."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{netns}") as namespace:
        steps = (
            libc.setns(namespace.fileno(), _CLONE_NEWNET),
            libc.unshare(_CLONE_NEWNS),
            libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None),
            libc.umount2(b"/sys", _MNT_DETACH),
            libc.mount(netns.encode(), b"/sys", b"sysfs", 0, None),
        )
    if any(steps):
        raise OSError(ctypes.get_errno(), f"cannot enter {netns}: {steps}")


def _answer(connection: Connection, side: Side, method: str, args: tuple[Any, ...]) -> None:
    try:
        connection.send(getattr(side, method)(*args))
    except Exception as error:
        connection.send(error)


def answer(side: RemoteSide | Side, key: Key, within_s: float = 20.0) -> ReceiveEnded | SourceFree:
    """Wait for the one answer about `key`."""
    return until(lambda: answers(side.drain(), key), within_s)[0]


def close_all(sides: Iterable[RemoteSide]) -> None:
    for side in sides:
        side.close()
