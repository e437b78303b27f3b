"""`kv_transfer_params`: what is read of them, and what is said when they are wrong."""

import pytest

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, EngineId, Key, Target, TransferId
from kvpush.core.mode import Mode
from kvpush.core.params import ReceiveParams, parse, receive_params

KEY = Key(TransferId("0" * 32), 3)
TARGET = Target(Address("10.0.0.1", 5600), EngineId("p"))


@pytest.mark.parametrize("mode", [None, *Mode])
def test_receiver_reads_what_the_router_has_written(mode: Mode | None) -> None:
    assert parse(receive_params(KEY, TARGET, 2, mode)) == ReceiveParams(KEY, TARGET, 2, mode)


def test_request_for_auto_leaves_the_choice_to_the_pair() -> None:
    parsed = parse({**receive_params(KEY, TARGET), "mode": "auto"})
    assert isinstance(parsed, ReceiveParams)
    assert parsed.mode is None


def test_unknown_mode_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'teleport'.*\$\.mode"):
        parse({**receive_params(KEY, TARGET), "mode": "teleport"})
