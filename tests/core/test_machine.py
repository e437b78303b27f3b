"""A rule-based state machine over larger worlds: several processes, several prompts, every fault, in any order.

The oracle checks the rules at each step; at the end of each run everything ends and nothing is left over.
"""

from random import Random

import pytest
from core.data_plane import Write
from core.network import LOST, Fate
from core.process import Process
from core.world import World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvpush.core.config import ProtocolConfig
from kvpush.core.errors import Reason
from kvpush.core.ids import Key
from kvpush.core.messages import Message
from kvpush.core.tables import RECEIVER, Recv, RecvAction, RecvInput

CONFIG = ProtocolConfig(
    lease_s=4.0,
    heartbeat_s=1.0,
    peer_timeout_s=3.0,
    connect_timeout_s=2.0,
    doubt_s=1.0,
    unannounced_s=3.0,
    notice_grace_s=1.0,
    quarantine_s=4.0,
    drain_s=3.0,
    transfer_s=20.0,
)
TRANSPORT_S = CONFIG.quarantine_s / 2 - 0.1
"""How long a write may take: what is left of the quarantine after the sender's fence."""

TOKENS = 12
MOST_PROMPTS = 20
"""As many as fit into one pool."""


class Machine(RuleBasedStateMachine):
    """Two senders, two receivers; each prompt belongs to one of either."""

    waiting: Bundle[Key] = Bundle("waiting")  # keys whose receiver has no blocks yet
    computing: Bundle[Key] = Bundle("computing")  # keys whose prompt is not complete
    keys: Bundle[Key] = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(CONFIG)
        self.senders = [self.world.start(f"p{i}") for i in range(2)]
        self.receivers = [self.world.start(f"d{i}") for i in range(2)]
        self.prompts: dict[Key, tuple[Process, Process]] = {}
        self.unread: set[Key] = set()
        self.uncomputed: set[Key] = set()
        self.luck = Random(0)
        self.world.judge(self._judge)
        self.world.data.holding = self._hold

    @initialize(seed=st.integers(0, 2**32))
    def fix_luck(self, seed: int) -> None:
        """What happens to frames and writes; too much of it for Hypothesis to choose one by one."""
        self.luck = Random(seed)

    def _judge(self, _source: Process, _destination: Process, _message: Message) -> Fate | None:
        luck = self.luck.random()
        if luck > 0.97:
            return LOST
        return Fate(copies=2) if luck > 0.94 else Fate(delay_s=luck - 0.5 if luck > 0.7 else 0.0)

    def _hold(self, write: Write) -> bool:
        """Each write lands or fails by itself, within what the transport takes at most."""
        takes = self.luck.choice((0.001, 0.1, 1.0)) * self.luck.random() * TRANSPORT_S
        if self.luck.random() < 0.05:
            self.world.after(takes, lambda: self.world.data.fail(write, "broken"))
        else:
            self.world.after(takes, lambda: self.world.data.land(write))
        return True

    # engines --------------------------------------------------------------------------------------------
    @precondition(lambda self: len(self.prompts) < MOST_PROMPTS)
    @rule(targets=(keys, computing), sender=st.integers(0, 1), receiver=st.integers(0, 1))
    def ask(self, sender: int, receiver: int) -> Key:
        """A request whose blocks are there at once."""
        key = self._begin(sender, receiver)
        self._receive(key)
        return key

    @precondition(lambda self: len(self.prompts) < MOST_PROMPTS)
    @rule(targets=(keys, computing, waiting), sender=st.integers(0, 1), receiver=st.integers(0, 1))
    def queue(self, sender: int, receiver: int) -> Key:
        """A request that waits for blocks."""
        key = self._begin(sender, receiver)
        p, d = self.prompts[key]
        if d.alive and not d.hung:
            d.expect(key, p)
        return key

    def _begin(self, sender: int, receiver: int) -> Key:
        key = self.world.key()
        self.prompts[key] = (self.senders[sender], self.receivers[receiver])
        self.unread.add(key)
        self.uncomputed.add(key)
        self.prompts[key][0].announce(key)
        return key

    @rule(key=consumes(waiting))
    def allocate(self, key: Key) -> None:
        self._receive(key)

    def _receive(self, key: Key) -> None:
        p, d = self.prompts[key]
        if d.alive and not d.hung:
            self.unread.discard(key)
            d.receive(key, p, TOKENS)

    @rule(key=computing)
    def compute_part(self, key: Key) -> None:
        p, _ = self.prompts[key]
        if p.alive and not p.hung and key in self.uncomputed:
            p.final(key, 5, last=False)

    @rule(key=consumes(computing), is_good=st.sampled_from([True, True, False]))
    def compute(self, key: Key, is_good: bool) -> None:
        p, _ = self.prompts[key]
        if p.alive and not p.hung:
            self.uncomputed.discard(key)
            p.final(key, TOKENS) if is_good else p.withdraw(key, Reason.PREFILL_ABORTED)

    @rule(key=keys)
    def abort(self, key: Key) -> None:
        _, d = self.prompts[key]
        if d.alive and not d.hung:
            d.abort(key)

    # time and faults ------------------------------------------------------------------------------------
    @rule(seconds=st.sampled_from([0.0005, 0.002, 0.1, 0.6]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(seconds=st.sampled_from([1.1, 2.1, 5.0]))
    def wait_longer(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(
        what=st.sampled_from(["cut", "part", "heal", "hang or resume", "hang or resume", "restart"]),
        sender=st.integers(0, 1),
        receiver=st.integers(0, 1),
        which=st.sampled_from(["sender", "receiver"]),
    )
    def suffer(self, what: str, sender: int, receiver: int, which: str) -> None:
        group, number = (self.senders, sender) if which == "sender" else (self.receivers, receiver)
        process = group[number]
        match what:
            case "cut":
                self.world.network.cut(process)
            case "part":
                self.world.network.part(self.senders[sender], self.receivers[receiver])
            case "heal":
                self.world.network.heal()
            case "restart":
                group[number] = self.world.restart(process)
            case _:
                process.resume() if process.hung else process.hang()

    def teardown(self) -> None:
        """The faults end, the engines finish, and so does everything."""
        self.world.network.judges.clear()
        self.world.network.heal()
        for process in self.senders + self.receivers:
            if process.hung:
                process.resume()
        for key, (p, d) in self.prompts.items():
            if p.alive and key in self.uncomputed:
                p.withdraw(key)
            if d.alive and key in self.unread:
                d.abort(key)
        self.world.settle()


QUICK = settings(max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=4000, stateful_step_count=80)
SEARCH = settings(
    LONG, max_examples=1000, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
)


def test_everything_ends_whatever_happens() -> None:
    run_state_machine_as_test(Machine, settings=QUICK)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_everything_ends_whatever_happens_for_long() -> None:
    run_state_machine_as_test(Machine, settings=LONG)


# the machine itself: a protocol with a hole in it is caught -----------------------------------------------
def test_machine_finds_blocks_that_are_freed_when_cancelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9 broken: the abort does not wait for an answer."""
    freed = (Recv.CANCELLING, (RecvAction.FREE, RecvAction.CANCEL))
    monkeypatch.setitem(RECEIVER, (Recv.ACCEPTED, RecvInput.ABORT), freed)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=SEARCH)
