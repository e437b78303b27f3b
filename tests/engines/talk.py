"""Conversations over engine processes: each turn goes on from the one before, as a router makes its legs."""

from dataclasses import dataclass, replace

from engines.calls import Answer, Ask
from engines.harness import EngineProcess, new_id, new_key, prompt_of

from kvpush.core.digests import GRANULE
from kvpush.core.ids import Address, EngineId, Target
from kvpush.core.params import Reference, receive_params, send_params

SAID = 45
ANSWERED = 24


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: its whole prompt, the answer, and how many of the prompt's tokens the prefill engine
    has received, or had."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    not_computed: int

    @property
    def left(self) -> int:
        """How many tokens the decode engine keeps of it, as far as they can be asked for."""
        computed = len(self.prompt) + len(self.answer) - 1
        return computed - computed % GRANULE


class Conversation:
    """One conversation. `seed` decides what its user says."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.turns: list[Turn] = []
        self.kept: Reference | None = None

    def next_prompt(self) -> tuple[int, ...]:
        """All that was said so far, and something new."""
        said = prompt_of(SAID, seed=1000 * self._seed + len(self.turns))
        before = self.turns[-1].prompt + self.turns[-1].answer if self.turns else ()
        return before + said

    def alone(self, engine: EngineProcess) -> Turn:
        """The next turn, by one engine."""
        ask = Ask(request_id=new_id(), prompt=self.next_prompt(), max_tokens=ANSWERED)
        (answer,) = engine.ask(ask)
        return self.add(ask, answer)

    def legs(self, prefill: EngineProcess, decode: EngineProcess) -> tuple[Ask, Ask, Reference]:
        """The legs of the next turn, and what is kept of it."""
        ask = Ask(request_id=new_id(), prompt=self.next_prompt(), max_tokens=ANSWERED)
        key, kept = new_key(), Reference(new_key(), target_of(decode))
        first = replace(ask, max_tokens=1, params=send_params(key, self.kept))
        return first, replace(ask, params=receive_params(key, target_of(prefill), keep=kept.key)), kept

    def turn(self, prefill: EngineProcess, decode: EngineProcess) -> Turn:
        """The next turn, over two engines."""
        first, second, kept = self.legs(prefill, decode)
        decode.add(second)
        (prefilled,) = prefill.ask(first)
        (answer,) = decode.collect(second)
        return self.add(second, answer, prefilled, kept)

    def add(self, ask: Ask, answer: Answer, prefilled: Answer | None = None, kept: Reference | None = None) -> Turn:
        """A turn has been answered."""
        self.kept = kept
        self.turns.append(Turn(ask.prompt, answer.tokens, prefilled.cached_tokens if prefilled else 0))
        return self.turns[-1]


def target_of(engine: EngineProcess) -> Target:
    """What a router would tell others of an engine."""
    ready = engine.ready
    return Target(Address(ready.host, ready.port), EngineId(ready.engine_id))
