"""The world of the model check for blocks that are set aside late: D asks to be told when P has begun, and registers
then. It wants the first token of the answer with the prompt, too."""

from collections.abc import Iterator
from dataclasses import dataclass

from core.flight import D, P
from core.model import TARGET, Action, Model
from core.snapshot import Print

from kvpush.core.commands import Abort, Announce, Begin, Expect, Final, Receive, Sampled, Watch, Withdraw
from kvpush.core.errors import Reason
from kvpush.core.events import Event, Outcome, PrefillBegun, ReceiveEnded
from kvpush.core.ids import Key, RequestId
from kvpush.core.layout import Span

TOKEN = 4711
_STAGES = ("announce", "begin", "sampled")
"""What P's engine says of a prompt beside that it is final."""


@dataclass
class BegunModel(Model):
    """As `Model`, with one block per prompt. Receiving is watching, and registering once the prompt has begun."""

    begun: frozenset[Key] = frozenset()

    def _by_engines(self) -> Iterator[Action]:
        for i, key in enumerate(self.bounds.keys):
            number = str(i)
            if not self.hung:
                yield from self._by_p(number, i)
            yield from self._once("receive", number, "watch")
            if key in self.begun:
                yield from self._once("receive", number)
            if ("receive", number, "watch") in self.done and i < self.bounds.transfers - self.bounds.plain:
                yield from self._once("abort", number)

    def _by_p(self, number: str, i: int) -> Iterator[Action]:
        yield from self._once("final", number, "announce")
        if ("final", number, "announce") in self.done:
            if ("final", number) not in self.done:
                yield from self._once("final", number, "begin")
            yield from self._once("final", number, "sampled")
            yield from self._once("final", number)
        if i < self.bounds.transfers - self.bounds.plain and ("final", number) not in self.done:
            yield from self._once("withdraw", number)

    def _once(self, *action: str) -> Iterator[Action]:
        aborted = action[0] == "receive" and ("abort", action[1]) in self.done
        if not aborted:
            yield from super()._once(*action)

    def _command(self, kind: str, number: int, rest: list[str]) -> None:
        key, request = self.bounds.keys[number], RequestId(f"r{number}")
        match kind, rest:
            case "receive", ["watch"]:
                self.execute(D, Expect(key, request, TARGET))
                self.execute(D, Watch(key, request))
            case "receive", _:
                self.receiving |= {key}
                self.execute(D, Receive(key, request, TARGET, Span(0, 4), ((number,),), wants_token=True))
            case "abort", _:
                self.execute(D, Abort(key))
            case "withdraw", _:
                self.owed |= {key}
                self.execute(P, Withdraw(key, request, Reason.PREFILL_ABORTED))
            case _, ["announce"]:
                self.execute(P, Announce(key, request))
            case _, ["begin"]:
                self.execute(P, Begin(key, request))
            case _, ["sampled"]:
                self.execute(P, Sampled(key, request, TOKEN))
            case _:
                self.sources |= {key}
                self.owed |= {key}
                self.execute(P, Final(key, request, 4, ((number,),)))

    def _note(self, event: Event) -> None:
        if isinstance(event, PrefillBegun):
            assert event.key not in self.begun, f"R3: {event.key} has begun twice"
            self.begun |= {event.key}
            return
        super()._note(event)
        if isinstance(event, ReceiveEnded) and event.outcome is Outcome.DELIVERED:
            assert event.token == TOKEN, f"R6: {event.key} is delivered without its token"

    def _crash(self, who: str) -> None:
        numbers = [str(i) for i in range(self.bounds.transfers)]
        if who == P:
            self.done |= {("final", number, *stage) for number in numbers for stage in ((), *((s,) for s in _STAGES))}
            self.done |= {("withdraw", number) for number in numbers}
        super()._crash(who)
        if who == D:
            self.begun = frozenset()
            self.done |= {("receive", number, "watch") for number in numbers}

    def _numbers(self, *action: str) -> set[Key]:
        """The prompts of which something has been said."""
        return {key for i, key in enumerate(self.bounds.keys) if (action[0], str(i), *action[1:]) in self.done}

    @property
    def over(self) -> bool:
        """Whether nothing is going on any more but what the engines have to decide: P whether a prompt that it has
        begins, D about one that has begun. For these there is no deadline."""
        decided = self._numbers("final") | self._numbers("withdraw")
        p_decides = self._numbers("final", "announce") - decided
        d_decides = self.begun - self._numbers("receive") - self._numbers("abort")
        receiving, sending = self.ends[D]._receiver._transfers.keys(), self.ends[P]._sender._transfers.keys()
        busy = self.writes or self.notices or self.receiving or self.hung
        return not busy and sending | self.owed <= p_decides | d_decides and receiving <= p_decides | d_decides

    def fingerprint(self) -> Print:
        """States with the same fingerprint have the same future."""
        return (*super().fingerprint(), self.begun)
