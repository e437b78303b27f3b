"""The same key on both engines, another for each engine request."""

import pytest

from kvpush.core.errors import ConfigError
from kvpush.core.ids import Key, TransferId
from kvpush.vllm.keys import sub_key

_KEY = Key(TransferId("a" * 32))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("chatcmpl-9f3c-0a1b2c3d", "chatcmpl-77aa-ffffffff"),
        ("1_chatcmpl-9f3c-0a1b2c3d", "1_chatcmpl-77aa-ffffffff"),
        ("cmpl-9f3c-2-0a1b2c3d", "cmpl-77aa-2-12345678"),
        ("3_cmpl-9f3c-2-0a1b2c3d", "3_cmpl-77aa-2-12345678"),
        ("cmpl-9f3c-2", "cmpl-77aa-2"),
    ],
)
def test_engines_agree_on_a_key_whatever_they_call_the_request(ours: str, theirs: str) -> None:
    assert sub_key(_KEY, ours) == sub_key(_KEY, theirs)


def test_requests_of_one_call_have_keys_of_their_own() -> None:
    names = [f"{choice}_cmpl-x-{prompt}-0a1b2c3d" for choice in range(3) for prompt in range(3)]

    assert len({sub_key(_KEY, name) for name in names}) == 9


def test_only_prompt_of_a_call_has_the_key_of_a_single_request() -> None:
    assert sub_key(_KEY, "cmpl-x-0-0a1b2c3d") == sub_key(_KEY, "chatcmpl-y-0a1b2c3d") == _KEY


def test_chat_request_whose_client_chose_an_odd_id_is_no_list_of_prompts() -> None:
    assert sub_key(_KEY, "chatcmpl-order-66-0a1b2c3d") == _KEY


@pytest.mark.parametrize("name", ["1024_cmpl-x-0", "cmpl-x-16384-0a1b2c3d"])
def test_call_with_too_many_requests_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not below"):
        sub_key(_KEY, name)


def test_attempts_of_one_transfer_differ_from_its_sub_requests() -> None:
    second = Key(_KEY.transfer_id, 1)
    names = ["0_cmpl-x-0", "1_cmpl-x-0", "0_cmpl-x-1"]

    assert len({sub_key(key, name) for key in (_KEY, second) for name in names}) == 6
