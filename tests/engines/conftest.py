"""Fixtures that start engines once per module."""

from collections.abc import Iterator

import pytest
from engines.harness import Pair, running

from kvpush.cli.models import ensure_model
from kvpush.sim.orders import EngineConfig


@pytest.fixture(scope="session")
def tiny() -> str:
    """The folder of the seeded test model."""
    return str(ensure_model("tiny"))


@pytest.fixture(scope="module")
def pair(tiny: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A prefill and a decode engine. A test module may parametrize it with two `EngineConfig` changes."""
    prefill, decode = getattr(request, "param", ({}, {}))
    configs = (
        EngineConfig(name="prefill", model=tiny, role="kv_producer", **{"extra": {"port": 0}, **prefill}),
        EngineConfig(name="decode", model=tiny, role="kv_consumer", **{"extra": {"port": 0}, **decode}),
    )
    with running(tmp_path_factory.mktemp("engines"), *configs) as (first, second):
        yield Pair(first, second)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting engines takes longer than other tests may."""
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.timeout(900))
