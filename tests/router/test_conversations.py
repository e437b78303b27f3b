"""Another turn of a conversation finds the engine that keeps the one before: the router's half."""

import json
from typing import Any

import pytest
from router.rig import Rig, rigged
from router.stub import Cut, Reply, Seen, error_reply, good_decode, json_reply

from kvpush.core.ids import Address, Key, TransferId
from kvpush.router.asked import parse_asked
from kvpush.router.body import Route
from kvpush.router.config import Connector, ConversationMode, EngineRole, EngineSpec
from kvpush.router.conversations import PIECE_BYTES, Conversations, beginnings_of
from kvpush.router.engine import Engine

CHAT = "/v1/chat/completions"


def messages(*said: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]


async def say(rig: Rig, *said: str, key: str = "one", **fields: Any) -> None:
    answer = await rig.post(
        CHAT, headers={"Authorization": f"Bearer {key}"}, model="m", messages=messages(*said), **fields
    )
    assert answer.status == 200


def kept(seen: Seen) -> str:
    """Under which id a decode leg is to be kept."""
    key: str = seen.params["keep"]["transfer_id"]
    return key


def asked_for(seen: Seen) -> str | None:
    """Which earlier turn a prefill leg was told of."""
    reuse = seen.params.get("reuse")
    return reuse["transfer_id"] if reuse else None


# over HTTP --------------------------------------------------------------------------------------------------
async def test_prefill_engine_is_told_who_keeps_the_turn_before() -> None:
    async with rigged() as rig:
        await say(rig, "hello")
        await say(rig, "hello", "hi", "how are you?")
        await say(rig, "hello", "hi", "how are you?", "fine", "good")

        assert [asked_for(seen) for seen in rig.prefill.seen] == [None, *(kept(seen) for seen in rig.decode.seen[:2])]
        assert rig.prefill.seen[1].params["reuse"] == {
            "transfer_id": kept(rig.decode.seen[0]),
            "attempt": 0,
            "remote_host": "127.0.0.1",
            "remote_port": rig.decode.control_port,
            "remote_engine_id": "d0",
        }
        ids = [seen.params["transfer_id"] for seen in rig.decode.seen] + [kept(seen) for seen in rig.decode.seen]
        assert len(set(ids)) == 6, "each transfer has an id of its own"


async def test_plain_prompt_that_goes_on_finds_the_one_before() -> None:
    async with rigged() as rig:
        await rig.post(prompt="word " * 50)
        await rig.post(prompt="word " * 50 + "and an answer, and more words")
        assert asked_for(rig.prefill.seen[1]) == kept(rig.decode.seen[0])


async def test_two_clients_with_the_same_conversation_never_share() -> None:
    async with rigged() as rig:
        await say(rig, "hello", key="one")
        await say(rig, "hello", "hi", "how are you?", key="another")
        await say(rig, "hello", "hi", "how are you?", key="one")
        assert [asked_for(seen) for seen in rig.prefill.seen] == [None, None, kept(rig.decode.seen[0])]


async def test_other_branch_of_a_conversation_does_not_ask_for_what_was_asked_for() -> None:
    async with rigged() as rig:
        await say(rig, "hello")
        await say(rig, "hello", "hi", "how are you?")
        await say(rig, "hello", "hi", "who are you?")
        assert [asked_for(seen) for seen in rig.prefill.seen] == [None, kept(rig.decode.seen[0]), None]


async def test_turn_that_failed_is_not_remembered() -> None:
    def refusing(seen: Seen) -> Reply:
        return error_reply(400)

    async with rigged() as rig:
        rig.decode.script = refusing
        await rig.post(CHAT, model="m", messages=messages("hello"))
        rig.decode.script = good_decode
        await rig.post(CHAT, model="m", messages=messages("hello", "hi", "more"))
        assert [asked_for(seen) for seen in rig.prefill.seen] == [None, None]


async def test_several_choices_are_not_kept() -> None:
    async with rigged() as rig:
        await say(rig, "hello", n=2)
        assert "keep" not in rig.decode.seen[0].params


async def test_nothing_is_kept_when_it_is_switched_off() -> None:
    async with rigged(conversations=ConversationMode.OFF) as rig:
        await say(rig, "hello")
        await say(rig, "hello", "hi", "how are you?")
        assert [set(seen.params) & {"keep", "reuse"} for seen in rig.prefill.seen + rig.decode.seen] == [set()] * 4


@pytest.mark.parametrize("connector", [Connector.VLLM_PUSH, Connector.VLLM_PULL])
async def test_other_connectors_are_told_nothing(connector: Connector) -> None:
    async with rigged(connector=connector) as rig:
        await say(rig, "hello")
        await say(rig, "hello", "hi", "how are you?")
        assert [set(seen.params) & {"keep", "reuse"} for seen in rig.prefill.seen + rig.decode.seen] == [set()] * 4


async def test_client_cannot_name_a_turn_itself() -> None:
    async with rigged() as rig:
        await say(rig, "hello", kv_transfer_params={"reuse": {"transfer_id": "mine"}})
        assert asked_for(rig.prefill.seen[0]) is None


async def test_router_says_how_many_tokens_were_not_computed(caplog: pytest.LogCaptureFixture) -> None:
    def saving(seen: Seen) -> Reply:
        return json_reply({"choices": [], "kv_transfer_params": {"reused_tokens": 96}})

    async with rigged(prefill=(saving,)) as rig:
        await say(rig, "hello")
        with caplog.at_level("INFO", "kvpush.router.request"):
            await say(rig, "hello", "hi", "how are you?")
        page = (await rig.get("/metrics")).body.decode()

        assert "kvpush_router_earlier_turns_total 1.0" in page
        assert "kvpush_router_reused_tokens_total 96.0" in page
        line = json.loads(caplog.records[-1].message)
        assert (line["earlier_turn"], line["reused_tokens"]) == (kept(rig.decode.seen[0]), 96)


async def test_second_try_does_not_ask_for_a_turn_again() -> None:
    def broken(seen: Seen) -> Reply:
        return Reply(chunks=(), cut=Cut.BEFORE_HEAD)

    async with rigged() as rig:
        await say(rig, "hello")
        rig.decode.script = broken
        await rig.post(
            CHAT, headers={"Authorization": "Bearer one"}, model="m", messages=messages("hello", "hi", "more")
        )
        assert [asked_for(seen) for seen in rig.prefill.seen] == [None, kept(rig.decode.seen[0]), None]


# what is remembered -----------------------------------------------------------------------------------------
def beginnings(*said: str, tenant: str = "") -> tuple[bytes, ...]:
    body = json.dumps({"model": "m", "messages": messages(*said)}).encode()
    return beginnings_of(parse_asked(Route.CHAT, body), tenant)


def engine() -> Engine:
    spec = EngineSpec(url="http://d:1", control=Address("d", 2))
    return Engine(spec, EngineRole.DECODE, generation=1)


def key_of(number: int) -> Key:
    return Key(TransferId(f"{number:032x}"))


def test_latest_turns_are_remembered_up_to_the_capacity() -> None:
    known = Conversations(2)
    for number in range(3):
        known.remember(beginnings(str(number)), key_of(number), engine())
    assert len(known) == 2
    assert known.take(beginnings("0", "", "more")) is None
    assert known.take(beginnings("2", "", "more")) is not None


def test_longest_beginning_wins() -> None:
    known = Conversations(10)
    known.remember(beginnings("a"), key_of(1), engine())
    known.remember(beginnings("a", "b", "c"), key_of(2), engine())
    taken = [known.take(beginnings("a", "b", "c", "d", "e")) for _ in range(3)]
    assert [reference and reference.key for reference in taken] == [key_of(2), key_of(1), None]


def test_turns_of_an_engine_that_was_restarted_are_forgotten() -> None:
    known, keeper = Conversations(10), engine()
    known.remember(beginnings("a"), key_of(1), keeper)
    keeper.generation += 1
    assert known.take(beginnings("a", "b", "c")) is None


def test_prompt_shorter_than_a_piece_has_no_beginning() -> None:
    body = json.dumps({"model": "m", "prompt": "x" * (PIECE_BYTES - 2)}).encode()
    assert beginnings_of(parse_asked(Route.COMPLETIONS, body), "") == ()
