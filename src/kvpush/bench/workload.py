"""What is asked of a cluster: prompts and arrival times, drawn from a seed and nothing else."""

from dataclasses import dataclass

import numpy as np

from kvpush.core.errors import ConfigError
from kvpush.sim.kvfunc import FIRST_TOKEN
from kvpush.sim.model import word


@dataclass(frozen=True)
class Prompt:
    """One request: `tokens` is the prompt, `output` how many tokens to generate."""

    tokens: tuple[int, ...]
    output: int

    @property
    def text(self) -> str:
        """The prompt as the simulated model's tokenizer reads it."""
        return " ".join(word(token) for token in self.tokens)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`prefix_share`: the part of each prompt (0 to 1) that it has in common with all others of its draw."""

    input_tokens: int
    output_tokens: int
    prefix_share: float = 0.0

    def __post_init__(self) -> None:
        if self.input_tokens < 1:
            raise ConfigError("input", f"must be at least 1 token, got {self.input_tokens}", "Use a positive number.")
        if self.output_tokens < 1:
            raise ConfigError("output", f"must be at least 1 token, got {self.output_tokens}", "Use a positive number.")
        if not 0 <= self.prefix_share <= 1:
            raise ConfigError("prefix-share", f"{self.prefix_share} is no share", "Use a number from 0 to 1.")


def draw_prompts(shape: Shape, count: int, vocabulary: int, seed: int) -> list[Prompt]:
    """`count` prompts; the same arguments give the same prompts on every machine."""
    rng = np.random.default_rng(seed)
    shared = round(shape.input_tokens * shape.prefix_share)
    prefix = rng.integers(FIRST_TOKEN, vocabulary, shared)
    own = rng.integers(FIRST_TOKEN, vocabulary, (count, shape.input_tokens - shared))
    return [Prompt((*prefix.tolist(), *row.tolist()), shape.output_tokens) for row in own]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent, `rate` per second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(at) for at in np.cumsum(gaps) - gaps[0]]
