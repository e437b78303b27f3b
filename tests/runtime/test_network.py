"""Two processes with NIXL over TCP, and a network between them that delays, loses, and is cut."""

import shutil
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from netns import Cable, cable
from runtime.pair import RemoteSide, answer, close_all
from runtime.rig import until
from runtime.side import BRISK, announce, final, new_key, receive
from runtime.test_killed import HERE, LOST, SPAN, is_safe, push_until_delivered

from kvpush.core.events import Outcome, ReceiveEnded
from kvpush.core.ids import Address

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

PATIENT = replace(BRISK, quarantine_s=4.0)
"""The transport gives up an unreachable peer after 1 s here, well within the quarantine (R1)."""


@pytest.fixture
def joined() -> Iterator[Cable]:
    with cable() as laid:
        if laid is None:
            pytest.skip("network namespaces cannot be made here")
        yield laid


@pytest.fixture
def ends(joined: Cable) -> Iterator[tuple[RemoteSide, RemoteSide]]:
    """A sender and a receiver, each behind its end of the cable, that know each other."""
    sides = [
        RemoteSide(
            name,
            Address(joined.address(end), 0),
            protocol=PATIENT,
            environment={
                "UCX_TLS": "tcp",
                "UCX_NET_DEVICES": joined.devices[end],
                "UCX_TCP_USER_TIMEOUT": "1s",
            },
            netns=joined.names[end],
        )
        for end, name in enumerate(("prefill", "decode"))
    ]
    push_until_delivered(sides[0], sides[1], 0)
    yield sides[0], sides[1]
    close_all(sides)


@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
@pytest.mark.parametrize(
    "discipline",
    [
        "netem delay 20ms 5ms",
        "netem delay 5ms loss 3%",
        "tbf rate 4mbit burst 3kb latency 5ms",  # what does not fit into a queue of 5 ms is lost
    ],
)
def test_bad_network_makes_pushes_late_but_loses_none(
    joined: Cable, ends: tuple[RemoteSide, RemoteSide], discipline: str
) -> None:
    if not joined.spoil(*discipline.split()):
        pytest.skip(f"this kernel cannot do {discipline}")
    sender, receiver = ends
    for number in range(10):
        key = new_key()
        sender.fill(number)
        receiver.submit(receive(key, sender.address, SPAN.end, LOST))
        sender.submit(final(key, SPAN.end, HERE))
        ended = answer(receiver, key)
        assert isinstance(ended, ReceiveEnded)
        assert ended.outcome is Outcome.DELIVERED, ended
        assert receiver.tokens(SPAN, LOST) == sender.tokens(SPAN, HERE)


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_blocks_used_again_after_a_cut_are_written_by_nobody(
    joined: Cable, ends: tuple[RemoteSide, RemoteSide], frozen: bool
) -> None:
    """The sender still holds the write when the network is back, long after the receiver has given it up."""
    sender, receiver = ends
    key = new_key()
    receiver.submit(receive(key, sender.address, SPAN.end, LOST))
    sender.submit(announce(key))
    push_until_delivered(sender, receiver, 1)  # the registration has arrived
    joined.cut()
    sender.submit(final(key, SPAN.end, HERE))
    if frozen:
        sender.freeze()
    began = time.monotonic()
    ended = answer(receiver, key)
    assert isinstance(ended, ReceiveEnded)
    assert ended.quarantined
    assert time.monotonic() - began < PATIENT.peer_timeout_s + 2.0
    until(lambda: is_safe(receiver, key), PATIENT.lease_s + PATIENT.quarantine_s + 2.0)
    receiver.fill(7)
    ours = receiver.tokens(SPAN, LOST)
    joined.mend()
    if frozen:
        sender.thaw()
    push_until_delivered(sender, receiver, 2)
    assert receiver.tokens(SPAN, LOST) == ours
    assert answer(sender, key)
