"""An endpoint as its own engine knows it: commands in, each with its promise (see commands.py)."""

from kvpush.core.commands import (
    Abort,
    Announce,
    Begin,
    Command,
    Disown,
    Expect,
    Final,
    Inquire,
    Keep,
    Promise,
    Receive,
    Release,
    Retract,
    Sampled,
    Stop,
    Watch,
    Withdraw,
)
from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import LocalProtocolError, Reason
from kvpush.core.events import Found, PrefillBegun, SourceFree, Stopped
from kvpush.core.ids import EngineId, Epoch
from kvpush.core.inbound import Inbound
from kvpush.core.inquiring import Inquirer
from kvpush.core.keeping import Keeper
from kvpush.core.layout import Layout
from kvpush.core.lender import Lender
from kvpush.core.messages import Hello
from kvpush.core.mode import Mode
from kvpush.core.outbound import Outbound
from kvpush.core.outbox import Outbox
from kvpush.core.peers import Peers
from kvpush.core.receiver import Receiver


class EngineSide:
    """What all of an endpoint is made of, and the half of it that its engine talks to."""

    def __init__(
        self,
        config: ProtocolConfig,
        engine_id: EngineId,
        epoch: Epoch,
        layout: Layout,
        metadata: bytes,
        modes: tuple[Mode, ...] = (Mode.PUSH,),
    ) -> None:
        """`metadata` is our transport's, sent to peers in the hello; `modes` are those that we take part in."""
        self._config = config
        self._engine_id = engine_id
        self._outbox = Outbox(epoch)
        self._peers = Peers(self._outbox)
        us = Hello(engine_id, None, layout, metadata, modes)
        self._inbound = Inbound(config, us, self._peers, self._outbox)
        self._outbound = Outbound(config, us, self._peers, self._outbox)
        self._sender = Lender(config, layout, self._outbox)
        self._keeper = Keeper(config, self._sender, self._inbound)
        self._receiver = Receiver(config, layout, self._outbound, self._outbox)
        self._inquirer = Inquirer(config, self._outbound, self._outbox)
        self._stop_by: float | None = None

    # our engine -----------------------------------------------------------------------------------------
    def execute(self, command: Command, now: float) -> None:
        """Take one command of our engine.

        A command that breaks the rules changes nothing, is counted, keeps its promise of an answer (see
        commands.py) and raises `LocalProtocolError` for the log.
        """
        self.expire(now)
        try:
            self._execute(command, now)
        except LocalProtocolError as error:
            self._outbox.count("local_error", error.reason)
            self._answer(command, error, now)
            raise

    def _execute(self, command: Command, now: float) -> None:
        if self._stop_by is not None:
            self._answer(command, LocalProtocolError("the transfer thread is stopping", Reason.SHUTDOWN), now)
            return
        match command:
            case Announce():
                self._sender.announce(command, now)
            case Begin():
                self._sender.begin(command, now)
            case Sampled():
                self._sender.sampled(command, now)
            case Final():
                self._sender.final(command, now)
            case Retract():
                self._sender.retract(command, now)
            case Withdraw():
                self._sender.withdraw(command, now)
            case Promise():
                self._keeper.promise(command)
            case Keep():
                self._keeper.keep(command, now)
            case Release():
                self._keeper.release(command, now)
            case Expect():
                self._receiver.expect(command, now)
            case Inquire():
                self._receiver.check_mine(command.key, command.request_id)
                self._inquirer.inquire(command, now)
            case Watch():
                self._receiver.watch(command, now)
            case Receive():
                self._receiver.receive(command, now)
            case Abort():
                self._inquirer.end(command.key)
                self._receiver.abort(command, now)
            case Disown():
                self._receiver.disown(command, now)
            case Stop():
                self._stop(now)

    def _answer(self, command: Command, error: LocalProtocolError, now: float) -> None:
        """A request whose command is not carried out must not wait for ever, nor free what another one uses."""
        match command:
            case Watch(key, request_id):
                self._outbox.event(PrefillBegun(key, request_id))
            case Receive():
                self._receiver.refuse(command, error, now)
            case Final(last=True) | Withdraw():
                self._sender.refuse(command, error, now)
            case Keep():
                self._outbox.event(SourceFree(command.key, command.request_id))
            case Inquire():
                self._outbox.event(Found(command.key, command.request_id, 0))
            case _:
                pass

    def _stop(self, now: float) -> None:
        self._stop_by = now + self._config.stop_s
        self._keeper.stop(now)
        self._inquirer.stop()
        self._sender.stop(now)
        self._receiver.stop(now)
        self._finish_stop(now)

    def _finish_stop(self, now: float) -> None:
        """Report `Stopped` once, when nothing is left or the bound has come."""
        if self._stop_by is None or self._stop_by == float("inf"):
            return
        if now >= self._stop_by:
            self._receiver.abandon(now)
        if now >= self._stop_by or not (len(self._sender) or len(self._receiver)):
            self._stop_by = float("inf")
            self._outbox.event(Stopped())

    def expire(self, now: float) -> None:
        """Let the time pass that others rely on."""
        raise NotImplementedError
