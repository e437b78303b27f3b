"""What all tests need."""

import logging

import pytest


@pytest.fixture(autouse=True)
def log_lines_reach_caplog() -> None:
    """Undo, for each test, what earlier ones did. vLLM's plugin has kvpush log below vLLM's logger, which hands nothing
    on to the root where `caplog` listens; `kvpush bench faults` silences it for the rest of its process."""
    logging.getLogger("kvpush").parent = logging.getLogger()
    logging.getLogger("kvpush").setLevel(logging.NOTSET)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what passed tests have to say, each as a property named "said", whichever process they ran in."""
    said = [
        str(value)
        for report in terminalreporter.stats.get("passed", ())
        for name, value in report.user_properties
        if name == "said"
    ]
    if said:
        terminalreporter.section("what tests have counted")
        terminalreporter.write_line("\n".join(said))
