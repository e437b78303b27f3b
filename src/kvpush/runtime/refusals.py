"""Commands that are not carried out: the answers that they are promised (see core/commands.py) come all the same."""

from kvpush.core.commands import Abort, Command, Final, Inquire, Keep, Receive, Watch, Withdraw
from kvpush.core.errors import Reason
from kvpush.core.events import Event, Found, Outcome, PrefillBegun, ReceiveEnded, SourceFree


def of_the_dead(command: Command) -> list[Event]:
    """The answer when the transfer thread has ended: nothing was or will be written for it."""
    match command:
        case Watch(key=key, request_id=request):
            return [PrefillBegun(key, request)]
        case Receive(key=key, request_id=request):
            detail = "the transfer thread has ended"
            return [ReceiveEnded(key, request, Outcome.FAILED, Reason.SHUTDOWN, detail)]
        case Final(key=key, request_id=request, last=True) | Withdraw(key=key, request_id=request):
            return [SourceFree(key, request)]
        case Keep(key=key, request_id=request):
            return [SourceFree(key, request)]
        case Inquire(key=key, request_id=request):
            return [Found(key, request, 0)]
        case _:
            return []


def instead(command: Command, detail: str) -> tuple[list[Event], list[Command]]:
    """The answer to a command that cannot be read, and what to do in its place: it ends its own transfer, and nothing
    else."""
    match command:
        case Receive(key=key, request_id=request):
            ended = ReceiveEnded(key, request, Outcome.FAILED, Reason.INTERNAL, detail)
            return [ended], [Abort(key, Reason.INTERNAL)]
        case Final(key=key, request_id=request) | Keep(key=key, request_id=request):
            return [], [Withdraw(key, request, Reason.INTERNAL, detail)]
        case Inquire(key=key, request_id=request):
            return [Found(key, request, 0)], []
        case _:
            return [], []
