"""What a client, and either engine, sees of a transfer that goes wrong."""

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from engines.calls import Answer, Ask
from engines.harness import Pair, eventually, new_id, new_key, prompt_of
from engines.stranger import Stranger, epoch_of, flooded, shout

from kvpush.core.errors import Reason
from kvpush.core.ids import Address, EngineId, Epoch, Key, Target
from kvpush.core.layout import Span
from kvpush.core.messages import VERSION, Refuse, Register, encode_frame
from kvpush.core.params import receive_params

pytestmark = pytest.mark.engine

_TIMES = {
    "heartbeat_s": 0.2,
    "lease_s": 3.0,
    "peer_timeout_s": 2.0,
    "connect_timeout_s": 1.0,
    "unannounced_s": 1.0,
    "quarantine_s": 2.0,
    "port": 0,
}
_POLICIES = [
    pytest.param(({"extra": _TIMES}, {"extra": _TIMES, "failure_policy": policy}), id=policy)
    for policy in ("fail", "recompute")
]
_QUICK = [({"extra": _TIMES}, {"extra": _TIMES})]


@pytest.mark.parametrize("pair", _POLICIES, indirect=True)
class TestWithEitherPolicy:
    """A failed transfer gives an error or the reference text, never anything else."""

    def test_receiver_of_a_prefill_that_never_comes_ends_by_policy(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=1))
        (expected,) = pair.plain(ask)
        _, decode = pair.legs(ask)

        (answer,) = pair.decode.ask(decode)

        _assert_by_policy(pair, answer, expected)
        assert pair.decode.settled().transfers["receiver failed never_announced"] == 1
        pair.assert_nothing_held()

    def test_receiver_whose_sender_cannot_be_reached_ends_by_policy(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=2))
        (expected,) = pair.plain(ask)
        _, decode = pair.legs(ask)
        nobody = Target(Address("127.0.0.1", 9), EngineId("nobody"))

        (answer,) = pair.decode.ask(replace(decode, params=receive_params(_key(decode), nobody)))

        _assert_by_policy(pair, answer, expected)
        assert pair.decode.settled().transfers["receiver failed peer_handshake"] == 1
        pair.assert_nothing_held()

    def test_receiver_of_a_restarted_engines_address_ends_by_policy(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=3))
        (expected,) = pair.plain(ask)
        prefill, decode = pair.legs(ask)
        ready = pair.prefill.ready
        earlier = Target(Address(ready.host, ready.port), EngineId("the engine that was here before"))

        pair.prefill.add(prefill)
        (answer,) = pair.decode.ask(replace(decode, params=receive_params(_key(decode), earlier)))

        _assert_by_policy(pair, answer, expected)
        assert pair.decode.settled().transfers["receiver failed wrong_engine"] == 1
        pair.prefill.collect(prefill)
        pair.assert_nothing_held()

    def test_receiver_of_an_aborted_prefill_is_told_at_once(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=4))
        (expected,) = pair.plain(ask)
        prefill, decode = pair.legs(ask)

        with pair.prefill.held():
            pair.prefill.add(prefill)
            pair.prefill.abort(prefill)
            pair.decode.add(decode)
        (answer,) = pair.decode.collect(decode)

        _assert_by_policy(pair, answer, expected)
        assert pair.decode.settled().transfers["receiver failed prefill_aborted"] == 1
        pair.prefill.collect(prefill)
        pair.assert_nothing_held()

    def test_replayed_key_is_refused_and_moves_nothing(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=5))
        (expected,) = pair.plain(ask)
        prefill, decode = pair.legs(ask)
        pair.prefill.add(prefill)
        pair.decode.ask(decode)
        pair.forget()
        before = pair.decode.settled().nbytes

        (answer,) = pair.decode.ask(replace(decode, request_id=new_id()))

        _assert_by_policy(pair, answer, expected)
        assert pair.decode.settled().nbytes == before
        pair.prefill.collect(prefill)
        pair.assert_nothing_held()

    def test_pair_still_works_after_all_of_this(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=6))
        (expected,) = pair.plain(ask)

        (answer,) = pair.ask(replace(ask, request_id=new_id()))

        assert answer.tokens == expected.tokens
        pair.assert_nothing_held()


@pytest.mark.parametrize("pair", _QUICK, indirect=True)
class TestAborts:
    """A client that leaves takes its blocks with it, on both engines."""

    def test_receiver_aborted_while_its_prefill_waits_frees_both_engines(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(200, seed=1))
        prefill, decode = pair.legs(ask)

        with pair.prefill.held():
            pair.prefill.add(prefill)
            pair.decode.add(decode)
            eventually(lambda: pair.decode.look().free_blocks < pair.decode.ready.free_blocks)
            pair.decode.abort(decode)
        pair.prefill.collect(prefill)

        pair.assert_nothing_held()

    def test_receiver_aborted_before_it_has_blocks_frees_a_finished_prefill_at_once(self, pair: Pair) -> None:
        ask = Ask(request_id=new_id(), prompt=prompt_of(200, seed=2))
        prefill, decode = pair.legs(ask)
        pair.prefill.ask(prefill)

        with pair.decode.held():
            pair.decode.add(decode)
            pair.decode.abort(decode)

        pair.assert_nothing_held()
        assert "lease_expired lease_expired" not in pair.prefill.look().counted

    def test_prefill_whose_receiver_never_comes_is_freed_when_its_lease_ends(self, pair: Pair) -> None:
        prefill, _ = pair.legs(Ask(request_id=new_id(), prompt=prompt_of(200, seed=3)))

        pair.prefill.ask(prefill)

        pair.assert_nothing_held()
        assert any(key.startswith("sender expired") for key in pair.prefill.look().transfers)

    def test_many_aborts_at_any_moment_leave_nothing_behind(self, pair: Pair) -> None:
        asks = [Ask(request_id=new_id(), prompt=prompt_of(50 + 7 * i, seed=i)) for i in range(24)]
        legs = [pair.legs(ask) for ask in asks]

        for index, (prefill, decode) in enumerate(legs):
            pair.decode.add(decode)
            pair.prefill.add(prefill)
            if index % 3 == 0:
                pair.decode.abort(legs[index // 2][1])
            if index % 4 == 0:
                pair.prefill.abort(legs[index // 2][0])
        pair.prefill.collect(*(prefill for prefill, _ in legs))
        pair.decode.collect(*(decode for _, decode in legs))

        pair.assert_nothing_held()


@pytest.mark.parametrize("pair", _QUICK, indirect=True)
class TestStrangers:
    """What no kvpush would say is refused with its reason, on both engines, and changes nothing that is right."""

    @pytest.fixture(autouse=True)
    def serves_before_and_after(self, pair: Pair) -> Iterator[None]:
        _assert_serves(pair, seed=20)
        yield
        _assert_serves(pair, seed=21)

    @pytest.mark.parametrize("name", ["prefill", "decode"])
    def test_garbage_is_refused(self, pair: Pair, name: str) -> None:
        engine = {"prefill": pair.prefill, "decode": pair.decode}[name]
        noise = random.Random(23)
        with Stranger(engine) as stranger:
            for frame in (b"", b"\xc1", b"\x94\x04", noise.randbytes(20_000)):
                assert _refusal(stranger, frame).reason is Reason.BAD_MESSAGE
            stranger.say(b"two", b"parts")
            shout(engine, noise.randbytes(20_000))
            eventually(lambda: engine.look().counted.get("control_message_refused bad_message", 0) >= 1)
        assert engine.look().counted["refused bad_message"] == 4

    @pytest.mark.parametrize("name", ["prefill", "decode"])
    def test_flood_costs_no_request_its_transfer(self, pair: Pair, name: str) -> None:
        engine = {"prefill": pair.prefill, "decode": pair.decode}[name]
        with flooded(engine):
            for seed in range(30, 36):
                _assert_serves(pair, seed)
        assert engine.look().counted["control_stranger_closed bad_message"] > 1

    @pytest.mark.parametrize("name", ["prefill", "decode"])
    def test_message_of_another_version_is_refused(self, pair: Pair, name: str) -> None:
        engine = {"prefill": pair.prefill, "decode": pair.decode}[name]
        with Stranger(engine) as stranger:
            refusal = _refusal(stranger, msgspec.msgpack.encode([VERSION + 1, 7, 0, {"type": "unheard of"}]))
        assert (refusal.reason, refusal.field) == (Reason.BAD_VERSION, "version")
        assert f"version {VERSION + 1}, this side {VERSION}" in refusal.detail

    @pytest.mark.parametrize("block", [-1, 1 << 20, 1 << 62])
    def test_registration_of_blocks_that_the_receiver_does_not_have_is_refused(self, pair: Pair, block: int) -> None:
        """By one who says that it is the decode engine, since others may register nothing at all."""
        receiver = epoch_of(pair.decode, pair.prefill)
        with Stranger(pair.prefill) as stranger:
            sender = stranger.ask(b"").source
            unknown = _refusal(stranger, encode_frame(Epoch(7), sender, _registration(block)))
            refusal = _refusal(stranger, encode_frame(receiver, sender, _registration(block)))
        assert unknown.reason is Reason.PEER_LOST
        assert (refusal.reason, refusal.field) == (Reason.BAD_BLOCK, "blocks[0]")
        assert f"id {block} is not in" in refusal.detail


def _registration(block: int) -> Register:
    return Register(new_key(), Span(0, 64), ((0, block),), 0.0)


def _refusal(stranger: Stranger, frame: bytes) -> Refuse:
    message = stranger.ask(frame).message
    assert isinstance(message, Refuse)
    return message


def _assert_serves(pair: Pair, seed: int) -> None:
    ask = Ask(request_id=new_id(), prompt=prompt_of(100, seed=seed))
    (expected,) = pair.plain(ask)
    pair.forget()
    before = pair.decode.settled().transfers.get("receiver delivered ok", 0)
    (answer,) = pair.ask(replace(ask, request_id=new_id()))
    assert answer.tokens == expected.tokens
    assert pair.decode.settled().transfers["receiver delivered ok"] == before + 1
    pair.assert_nothing_held()


@pytest.mark.parametrize("pair", [({}, {"num_blocks": 40, "max_num_seqs": 8, "max_model_len": 512})], indirect=True)
def test_decode_engine_that_must_preempt_answers_as_one_with_room(pair: Pair) -> None:
    asks = [Ask(request_id=new_id(), prompt=prompt_of(90 + i, seed=i), max_tokens=150) for i in range(12)]
    expected = [answer.tokens for answer in pair.plain(*asks)]
    pair.forget()

    answers = pair.ask(*(replace(ask, request_id=new_id()) for ask in asks))

    assert [answer.tokens for answer in answers] == expected
    assert pair.decode.settled().transfers["receiver delivered ok"] == len(asks)
    pair.assert_nothing_held()


def _assert_by_policy(pair: Pair, answer: Answer, expected: Answer) -> None:
    if pair.decode.config.failure_policy == "recompute":
        assert answer.tokens == expected.tokens
    else:
        assert answer.choices[0].finish_reason == "error"
        assert answer.tokens == ()


def _key(decode: Ask) -> Key:
    params = decode.params or {}
    return Key(params["transfer_id"], params["attempt"])
