"""What a comparison measures, in which order, and how long it is likely to take. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvpush.bench.contenders import Contender, Setting
from kvpush.bench.load import Concurrency, Load, Rate
from kvpush.bench.metrics import Slo
from kvpush.bench.workload import Shape
from kvpush.core.errors import ConfigError

START_S = 60.0
"""Roughly what starting a cluster takes, for the time left."""


class Pool(StrEnum):
    """In which order the engines' free blocks are when measuring begins."""

    CONTIGUOUS = "contiguous"
    FRAGMENTED = "fragmented"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. `rates` are shares of the measured saturation; exactly one of it and
    `concurrencies` is not empty. `requests` per cell and connector, spread over the rounds."""

    contenders: tuple[Contender, ...]
    setting: Setting
    inputs: tuple[int, ...]
    output: int
    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    requests: int = 40
    rounds: int = 2
    seed: int = 1
    pool: Pool = Pool.CONTIGUOUS
    prefix_share: float = 0.0
    timeout_s: float = 120.0
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        if bool(self.concurrencies) == bool(self.rates):
            raise ConfigError("concurrency/rate", "exactly one of them must be given", "Use --concurrency 1, say.")
        if any(rate <= 0 for rate in self.rates):
            raise ConfigError("rate", f"{min(self.rates)} is no share of saturation", "Use numbers greater than 0.")
        if any(requests < 1 for requests in self.concurrencies):
            raise ConfigError("concurrency", "must be at least 1", "Use a positive number.")
        if not 1 <= self.rounds <= self.requests:
            raise ConfigError("rounds", f"{self.rounds} rounds of {self.requests} requests", "Use 1 to --requests.")


@dataclass(frozen=True)
class Cell:
    """One input length at one load; `index` is its place among all."""

    index: int
    shape: Shape
    load: Load


@dataclass(frozen=True)
class Visit:
    """One contender's turn in one round: its cluster is started, measured in all cells, and stopped."""

    contender: Contender
    round: int


def visits(options: Options) -> list[Visit]:
    """Every contender once per round, in an order of its own in each, so that none is always first."""
    order = random.Random(options.seed)
    turns = []
    for number in range(options.rounds):
        contenders = list(options.contenders)
        order.shuffle(contenders)
        turns += [Visit(contender, number) for contender in contenders]
    return turns


def cells(options: Options, saturation: dict[int, float]) -> list[Cell]:
    """All cells; `saturation` maps input length to requests per second, and is needed for rates only."""
    made: list[Cell] = []
    for tokens in options.inputs:
        shape = Shape(input_tokens=tokens, output_tokens=options.output, prefix_share=options.prefix_share)
        for load in _loads(options, saturation.get(tokens, 0.0)):
            made.append(Cell(len(made), shape, load))
    return made


def _loads(options: Options, saturation: float) -> Sequence[Load]:
    if options.concurrencies:
        return [Concurrency(requests) for requests in options.concurrencies]
    return [Rate(share * saturation, share) for share in options.rates]


def requests_in_round(options: Options, number: int) -> range:
    """Which of a cell's requests belong to a round."""
    first, last = (options.requests * n // options.rounds for n in (number, number + 1))
    return range(first, last)


def seed_of(options: Options, cell: Cell, number: int) -> int:
    """The seed of a cell's prompts and arrivals in a round: the same for all contenders."""
    return (options.seed * 1_000 + number) * 1_000 + cell.index


def expected_seconds(load: Load, requests: int, request_s: float) -> float:
    """Roughly how long a cell takes, when one request alone takes `request_s`."""
    match load:
        case Concurrency(in_flight):
            return requests * request_s / in_flight
        case Rate(per_s):
            return requests / per_s + request_s
