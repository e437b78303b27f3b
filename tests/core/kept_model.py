"""The world of the model check for prompts that are kept for another turn: P keeps one, D asks and receives it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from core.flight import D, P
from core.model import TARGET, Action, Model
from core.snapshot import Print, ago

from kvpush.core.commands import Abort, Expect, Inquire, Keep, Receive, Release
from kvpush.core.digests import GRANULE, digests_of
from kvpush.core.events import Event, Found, Purpose
from kvpush.core.ids import Key, RequestId
from kvpush.core.layout import Span

KEEP_S = 5.0
BLOCKS = GRANULE // 4
"""What is kept is one granule, in blocks of four tokens."""

_DIGESTS = digests_of(range(GRANULE))


@dataclass
class KeptModel(Model):
    """As `Model`, but what is handed over is kept ("final"), and may be released ("withdraw"); receiving is asking,
    and then, if something was found, registering."""

    found: dict[Key, int] = field(default_factory=dict)

    def _by_engines(self) -> Iterator[Action]:
        for i, key in enumerate(self.bounds.keys):
            if not self.hung:
                yield from self._once("final", str(i))
            if not self.hung and ("final", str(i)) in self.done:
                yield from self._once("withdraw", str(i))
            yield from self._once("receive", str(i), "ask")
            if self.found.get(key):
                yield from self._once("receive", str(i))
            if ("receive", str(i), "ask") in self.done and i < self.bounds.transfers - self.bounds.plain:
                yield from self._once("abort", str(i))

    def _once(self, *action: str) -> Iterator[Action]:
        aborted = action[0] == "receive" and ("abort", action[1]) in self.done
        if action not in self.done and not aborted:
            yield action

    def _command(self, kind: str, number: int, rest: list[str]) -> None:
        key, request = self.bounds.keys[number], RequestId(f"r{number}")
        ids = tuple(range(number * BLOCKS, (number + 1) * BLOCKS))
        match kind, rest:
            case "receive", ["ask"]:
                self.execute(D, Expect(key, request, TARGET))
                self.execute(D, Inquire(key, request, TARGET, _DIGESTS))
            case "receive", _:
                self.receiving |= {key}
                self.execute(D, Receive(key, request, TARGET, Span(0, GRANULE), (ids,), purpose=Purpose.CONVERSATION))
            case "abort", _:
                self.execute(D, Abort(key))
            case "withdraw", _:
                self.execute(P, Release(key))
            case _:
                self.sources |= {key}
                self.owed |= {key}
                self.execute(P, Keep(key, request, GRANULE, (ids,), _DIGESTS, KEEP_S))

    def _note(self, event: Event) -> None:
        if isinstance(event, Found):
            assert event.key not in self.found, f"R3: {event.key} is answered twice"
            assert event.tokens in (0, GRANULE)
            self.found = {**self.found, event.key: event.tokens}
        else:
            super()._note(event)

    def _crash(self, who: str) -> None:
        super()._crash(who)
        if who == D:
            self.found = {}
            self.done |= {("receive", str(i), "ask") for i in range(self.bounds.transfers)}

    def _check(self) -> None:
        super()._check()
        asked = {self.bounds.keys[int(action[1])] for action in self.done if action[2:] == ("ask",)}
        waits = asked - self.found.keys()
        assert not waits or self.ends[D].next_deadline() is not None or self.epochs[D] > 1001, "R4: a question is open"

    @property
    def _undecided(self) -> set[Key]:
        """What was asked for, and D's engine has not decided about: for that there is no deadline."""
        done = {action[:2] for action in self.done if action[2:] != ("ask",)}
        asked = {action[1] for action in self.done if action[2:] == ("ask",)}
        decided = {number for kind, number in done if kind in ("receive", "abort")}
        return {self.bounds.keys[int(number)] for number in asked - decided}

    @property
    def over(self) -> bool:
        """Whether nothing is going on any more but what D's engine has to decide."""
        asking, sending, receiving = (
            self.ends[D]._inquirer._open,
            self.ends[P]._sender._transfers,
            self.ends[D]._receiver._transfers,
        )
        busy = self.writes or self.notices or self.receiving or self.hung or asking or sending
        return not busy and self.owed | receiving.keys() <= self._undecided

    def fingerprint(self) -> Print:
        keeper, inquirer = self.ends[P]._keeper, self.ends[D]._inquirer
        kept = tuple(
            (key, ago(kept.until, self.now), tuple(sorted(kept.promised.items())))
            for key, kept in sorted(keeper._kept.items())
        )
        asked = tuple(
            (key, ago(inquiry.retry_at, self.now), ago(inquiry.limit_at, self.now))
            for key, inquiry in sorted(inquirer._open.items())
        )
        return super().fingerprint(), kept, asked, tuple(sorted(self.found.items()))
