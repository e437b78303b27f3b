from pathlib import Path
from typing import Any

import pytest

from kvpush.bench.contenders import Contender, Setting, parse_contenders
from kvpush.bench.load import Concurrency, Rate
from kvpush.bench.plan import Options, cells, requests_in_round, seed_of, visits
from kvpush.core.errors import ConfigError

FOUR = (Contender.SINGLE, Contender.KVPUSH_PUSH, Contender.VLLM_PUSH, Contender.VLLM_PULL)


def options(**changed: Any) -> Options:
    fields: dict[str, Any] = {
        "contenders": FOUR,
        "setting": Setting(device="sim:ci", logs=Path("/tmp")),
        "inputs": (512, 2048),
        "output": 16,
        "rates": (0.4, 0.8),
        "requests": 10,
        "rounds": 3,
    }
    return Options(**{**fields, **changed})


def test_each_round_visits_every_contender_once_in_an_order_of_its_own() -> None:
    turns = visits(options(rounds=6))
    orders = [[turn.contender for turn in turns if turn.round == number] for number in range(6)]
    assert all(sorted(order) == sorted(FOUR) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert visits(options(rounds=6)) == turns


def test_cells_cover_each_input_at_each_share_of_its_own_saturation() -> None:
    made = cells(options(), {512: 20.0, 2048: 5.0})
    assert [(cell.index, cell.shape.input_tokens, cell.load) for cell in made] == [
        (0, 512, Rate(8.0, 0.4)),
        (1, 512, Rate(16.0, 0.8)),
        (2, 2048, Rate(2.0, 0.4)),
        (3, 2048, Rate(4.0, 0.8)),
    ]
    [first, *_] = cells(options(rates=(), concurrencies=(1, 4)), {})
    assert first.load == Concurrency(1)


def test_rounds_share_the_requests_out_without_loss_or_overlap() -> None:
    shares = [requests_in_round(options(), number) for number in range(3)]
    assert [i for share in shares for i in share] == list(range(10))


def test_prompts_are_the_same_for_all_contenders_and_differ_between_cells_and_rounds() -> None:
    given = options()
    made = cells(given, {512: 20.0, 2048: 5.0})
    seeds = {(cell.index, number): seed_of(given, cell, number) for cell in made for number in range(3)}
    assert len(set(seeds.values())) == len(seeds)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"concurrencies": (1,)}, "concurrency/rate"),
        ({"rates": ()}, "concurrency/rate"),
        ({"rates": (0.0,)}, "rate"),
        ({"rates": (), "concurrencies": (0,)}, "concurrency"),
        ({"rounds": 11}, "rounds"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        options(**changed)


def test_contenders_are_read_by_name_and_refused_by_name() -> None:
    assert parse_contenders("single, kvpush:push") == [Contender.SINGLE, Contender.KVPUSH_PUSH]
    for wrong in ("", "single,single", "vllm:teleport"):
        with pytest.raises(ConfigError, match="connectors"):
            parse_contenders(wrong)
