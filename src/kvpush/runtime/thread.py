"""The transfer thread: owns the transport, the control channel and the endpoint; everyone else uses its mailbox."""

import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvpush.core.commands import Command, Stop
from kvpush.core.config import ProtocolConfig
from kvpush.core.endpoint import Endpoint
from kvpush.core.errors import ConfigError
from kvpush.core.events import Event
from kvpush.core.ids import Address, EngineId, Epoch
from kvpush.core.layout import Layout
from kvpush.core.mode import ModeSetting
from kvpush.runtime.auth import check_secret
from kvpush.runtime.control import ControlChannel
from kvpush.runtime.driver import STOP_GRACE_S, Driver
from kvpush.runtime.local import ThreadEnd
from kvpush.runtime.mailbox import Mailbox
from kvpush.runtime.refusals import of_the_dead
from kvpush.runtime.sockets import ControlConfig
from kvpush.transport.base import Transport

logger = logging.getLogger("kvpush.transfer")

_CLOSE_S = 5.0
"""How long closing the transport and the channel may take, on top of ending the transfers."""


@dataclass(frozen=True, kw_only=True)
class ThreadConfig:
    """`listen` port 0 picks a free one. `secret` "" means an open control channel (a warning is logged).

    `poll_us`: the shortest wait between two polls of the transport while something is in flight.
    `switch_us`: how long a thread of this process may keep the interpreter lock from others that want it (see
    `sys.setswitchinterval`), lowered for the rest of the process's life; 0 leaves it as it is, 5000 by default. Next
    to a busy engine thread, each wake-up of the transfer thread may wait this long, several times per transfer.
    """

    engine_id: EngineId
    listen: Address
    mode: ModeSetting = ModeSetting.PUSH
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    secret: str = ""
    poll_us: int = 100
    switch_us: int = 0

    def __post_init__(self) -> None:
        check_secret(self.secret)
        if not 0 < self.poll_us <= 1_000_000:
            raise ConfigError("poll_us", f"must be from 1 to 1000000, got {self.poll_us}", "100 suits most machines.")
        if not 0 <= self.switch_us <= 1_000_000:
            raise ConfigError("switch_us", f"must be from 0 to 1000000, got {self.switch_us}", "0 changes nothing.")


class TransferThread:
    """Start it, submit commands, drain events. All methods may be called from any thread and never wait,
    but for `start` (until ready or failed) and `stop` (bounded by `protocol.stop_s` and the time to close)."""

    def __init__(
        self,
        config: ThreadConfig,
        layout: Layout,
        make_transport: Callable[[], Transport],
        localize: Callable[[Command], Command] | None = None,
    ) -> None:
        """`make_transport` is called on the thread, so that it owns what it makes. So is `localize`, which makes of a
        command what it means in this layout; a command for which it raises is refused."""
        self._config = config
        self._layout = layout
        self._make_transport = make_transport
        self._localize = localize
        self._mailbox = Mailbox()
        self._ready: Future[Address] = Future()
        self._driver: Driver | None = None
        self.local_path = ""
        self._ended = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"kvpush-{config.engine_id}", daemon=True)

    def start(self) -> Address:
        """Run the thread; returns the address it listens on. Raises `ControlError`, `TransportError` or
        `ConfigError`."""
        self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            self.stop()
            raise

    def submit(self, commands: Iterable[Command]) -> None:
        """Put commands into the mailbox and wake the thread: microseconds, no system call but one.

        A thread that has ended still keeps the promises made with each command (see core/commands.py).
        """
        self._mailbox.submit(commands)
        if self._ended.is_set():
            self._answer_for_the_dead()

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        return self._mailbox.drain()

    def stop(self) -> list[Event]:
        """End every transfer explicitly, close everything, join; returns the last events. Idempotent."""
        if self._thread.is_alive() and not self._stopping:
            self._stopping = True
            self._mailbox.submit([Stop()])
        if self._thread.is_alive():
            self._thread.join(self._config.protocol.stop_s + STOP_GRACE_S + _CLOSE_S)
        if self._thread.is_alive():
            logger.error("%s does not end; it is left behind.", self._thread.name)
        else:
            self._mailbox.close()
        return self.drain()

    @property
    def alive(self) -> bool:
        """False once the thread has ended, whatever the reason. Asked in every step of an engine."""
        return not self._ended.is_set()

    @property
    def turns(self) -> int:
        """How many turns the loop has taken: a thread with nothing to do takes none."""
        return self._driver.turns if self._driver else 0

    # on the thread ------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            with ExitStack() as closing:
                self._driver, address = self._assemble(closing)
                self._ready.set_result(address)
                self._driver.run()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                logger.critical("%s has ended with an error", self._thread.name, exc_info=True)
        finally:
            self._ended.set()
            self._answer_for_the_dead()

    def _assemble(self, closing: ExitStack) -> tuple[Driver, Address]:
        """Make what the thread owns. It is closed in reverse: last words leave after the transport has gone."""
        config = self._config
        if 0 < config.switch_us / 1e6 < sys.getswitchinterval():
            sys.setswitchinterval(config.switch_us / 1e6)
        channel = ControlChannel(config.listen, config.secret, config.control)
        closing.callback(channel.close)
        transport = self._make_transport()
        closing.callback(transport.close)
        transport.register(self._layout.regions, self._layout.memory)
        epoch = Epoch(secrets.randbits(63))
        modes = config.mode.modes
        endpoint = Endpoint(config.protocol, config.engine_id, epoch, self._layout, transport.metadata, modes)
        local = self._make_local_end(closing)
        driver = Driver(
            endpoint,
            transport,
            channel,
            self._mailbox,
            poll_s=config.poll_us / 1e6,
            stop_s=config.protocol.stop_s,
            local=local,
            localize=self._localize,
        )
        return driver, channel.address

    def _make_local_end(self, closing: ExitStack) -> ThreadEnd | None:
        """To and from the scheduler without its steps; without it all goes with them."""
        try:
            local = ThreadEnd()
        except OSError as error:
            logger.warning("No direct channel to the scheduler: %s", error)
            return None
        closing.callback(local.close)
        self.local_path = local.path
        return local

    def _answer_for_the_dead(self) -> None:
        """Answer the commands that nobody will execute any more; nothing was or will be written for them."""
        while commands := self._mailbox.take(1000):
            self._mailbox.publish(event for command in commands for event in of_the_dead(command))
