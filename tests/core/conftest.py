"""What most tests of the core begin with; those of another mode or other times have a world of their own."""

import pytest
from core.process import Process
from core.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pair(world: World) -> tuple[Process, Process]:
    """A sender and a receiver."""
    return world.pair()
