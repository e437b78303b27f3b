"""What the clients of a soak do: random, but the same for the same seed."""

import random
from dataclasses import dataclass

_BYTES = range(3, 203)
_LENGTHS = (1, 2, 31, 32, 33, 64, 200, 500, 900)
_SHARED = 4  # prompts whose beginnings are used again


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of all requests, 0 to 1. `continued`: it goes on from an earlier answer; `unsent`: the prefill leg is
    never sent, as when a prefill engine refuses it; `astray`: it goes to an engine that is known to be down."""

    aborted: float = 0.10
    shared_prefix: float = 0.25
    continued: float = 0.15
    unsent: float = 0.02
    astray: float = 0.05
    abort_within_s: float = 1.5


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One request of a client. `continues`: what has been said goes before the prompt. `leaves_after_s` None: it waits
    for the answer."""

    continues: bool
    prompt: tuple[int, ...]
    max_tokens: int
    leaves_after_s: float | None
    sends_prefill: bool
    may_go_astray: bool


class Clients:
    """An endless row of wishes."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix = mix
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(160) for _ in range(_SHARED)]

    def wish(self) -> Wish:
        """The next request."""
        return Wish(
            continues=self._is(self._mix.continued),
            prompt=self._prompt(),
            max_tokens=self._random.choice((1, 4, 16, 48)),
            leaves_after_s=self._random.uniform(0.0, self._mix.abort_within_s) if self._is(self._mix.aborted) else None,
            sends_prefill=not self._is(self._mix.unsent),
            may_go_astray=self._is(self._mix.astray),
        )

    def pick(self, count: int) -> int:
        """One of `count` engines."""
        return self._random.randrange(count)

    def _prompt(self) -> tuple[int, ...]:
        prefix = self._random.choice(self._prefixes) if self._is(self._mix.shared_prefix) else ()
        return prefix + self._tokens(self._random.choice(_LENGTHS))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(_BYTES, k=count))

    def _is(self, share: float) -> bool:
        return self._random.random() < share
