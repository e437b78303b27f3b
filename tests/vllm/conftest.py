"""Fixtures of the adapter's tests."""

import warnings

import pytest

with warnings.catch_warnings():
    # vLLM and torch warn of themselves while they are imported; it is our own warnings that are errors
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.scheduler
    import vllm.v1.structured_output  # noqa: F401

    import kvpush.vllm.connector  # noqa: F401

from kvpush.cli.models import ensure_model


@pytest.fixture(scope="session")
def tiny() -> str:
    """The folder of the seeded test model."""
    return str(ensure_model("tiny"))
