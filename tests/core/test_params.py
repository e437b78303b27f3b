"""`kv_transfer_params`: what a router writes is what an adapter reads."""

from typing import Any

import pytest

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Address, EngineId, Key, Target, TransferId
from kvpush.core.params import (
    ReceiveParams,
    Reference,
    SendParams,
    parse,
    receive_params,
    reused_tokens,
    send_params,
)

KEY, OTHER = Key(TransferId("a" * 32), 2), Key(TransferId("b" * 32))
TARGET = Target(Address("10.0.0.7", 5600), EngineId("e"))


@pytest.mark.parametrize("reuse", [None, Reference(OTHER, TARGET)])
def test_prefill_leg_is_read_as_it_was_written(reuse: Reference | None) -> None:
    assert parse(send_params(KEY, reuse)) == SendParams(KEY, reuse)


@pytest.mark.parametrize("keep", [None, OTHER])
def test_decode_leg_is_read_as_it_was_written(keep: Key | None) -> None:
    assert parse(receive_params(KEY, TARGET, 4, keep)) == ReceiveParams(KEY, TARGET, 4, keep)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({**send_params(KEY), "transfer_id": ""}, "kv_transfer_params.transfer_id"),
        ({**send_params(KEY), "attempt": -1}, "kv_transfer_params.attempt"),
        ({**send_params(KEY), "attempt": "1"}, "kv_transfer_params"),
        ({**send_params(KEY), "reuse": {"transfer_id": "x"}}, "kv_transfer_params.reuse.remote_host/remote_port"),
        ({**send_params(KEY), "reuse": {}}, "kv_transfer_params.reuse.transfer_id"),
        ({**receive_params(KEY, TARGET), "remote_port": 0}, "kv_transfer_params.remote_host/remote_port"),
        ({**receive_params(KEY, TARGET), "keep": {}}, "kv_transfer_params.keep.transfer_id"),
    ],
)
def test_wrong_parameter_is_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(params)
    assert caught.value.field == named


@pytest.mark.parametrize("params", [None, {}, {"transfer_id": "x"}])
def test_request_without_a_transfer_has_no_parameters(params: object) -> None:
    assert parse(params) is None


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [(b'{"reused_tokens": 48, "more": 1}', 48), (b"{}", 0), (b"[]", 0), (b'{"reused_tokens": "x"}', 0)],
)
def test_answer_says_how_many_tokens_were_reused(answer: bytes, tokens: int) -> None:
    assert reused_tokens(answer) == tokens
