"""What all tests need."""

import logging

import pytest


@pytest.fixture(autouse=True)
def log_lines_reach_caplog() -> None:
    """Undo, for each test, what vLLM's plugin did when an earlier test loaded it: kvpush logs below vLLM's logger,
    which hands nothing on to the root where `caplog` listens."""
    logging.getLogger("kvpush").parent = logging.getLogger()
