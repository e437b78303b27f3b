"""Kept prompts under whatever may happen: the oracle's rules hold, and each is given back in the end."""

from random import Random

from core.network import LOST, Fate
from core.process import Process
from core.world import World

from kvpush.core.digests import digests_of
from kvpush.core.events import Outcome
from kvpush.core.ids import Key
from kvpush.core.messages import Message

_TOKENS = tuple(range(40))
_VARIANTS = [digests_of(_TOKENS[:tokens] + (99,) * (40 - tokens)) for tokens in (0, 16, 32)]
_MOVES = 60


class Chance:
    """One run: engine `d` keeps prompts that engine `p` asks for and receives, and `luck` decides everything else."""

    def __init__(self, seed: int) -> None:
        self.luck = Random(seed)
        self.world = World()
        self.p, self.d = self.world.pair()
        self.keys: list[Key] = []
        self.open: set[Key] = set()
        self.trouble = 0.1
        self.world.judge(self._fate)

    def _fate(self, sender: Process, destination: Process, message: Message) -> Fate | None:
        if self.luck.random() >= self.trouble:
            return None
        return self.luck.choice((LOST, Fate(copies=2), Fate(delay_s=self.luck.uniform(0, 3))))

    def move(self) -> None:
        """Something happens."""
        moves = [self.keep, self.inquire, self.receive, self.receive, self.abort, self.release, self.wait, self.wait]
        self.luck.choice([*moves, self.strike] if self.luck.random() < 0.1 else moves)()

    def keep(self) -> None:
        if len(self.d.free) < 20:
            return
        self.keys.append(self.world.key())
        if self.luck.random() < 0.3:
            self.d.promise(self.keys[-1])
            self.inquire()
            self.wait()
        if not self.d.alive or len(self.d.free) < 20:
            return
        self.d.keep(self.keys[-1], 40, _VARIANTS[-1], keep_s=self.luck.choice((1.0, 30.0)))

    def inquire(self) -> None:
        unused = [key for key in self.keys if key not in self.p.found and key not in self.open]
        if unused:
            key = self.luck.choice(unused)
            self.open.add(key)
            self.p.inquire(key, self.d, self.luck.choice(_VARIANTS))

    def receive(self) -> None:
        found = [key for key in sorted(self.open) if self.p.found.get(key, 0) > 0]
        if found and len(self.p.free) > 20:
            key = self.luck.choice(found)
            self.open.remove(key)
            self.p.receive(key, self.d.target, self.p.found[key], start=self.luck.choice((0, 8)))

    def abort(self) -> None:
        if asked := sorted(self.open | self.p.destinations.keys()):
            key = self.luck.choice(asked)
            self.open.discard(key)
            self.p.abort(key)

    def release(self) -> None:
        if self.keys:
            self.d.release(self.luck.choice(self.keys))

    def wait(self) -> None:
        self.world.run(self.luck.choice((0.0005, 0.01, 0.5, 5.0)))

    def strike(self) -> None:
        match self.luck.choice(("cut", "hang", "restart")):
            case "cut":
                self.world.network.cut(self.p)
            case "hang":
                self.d.hang()
                self.world.run(self.luck.choice((0.5, 50.0)))
                self.d.resume()
            case _:
                self.d = self.world.restart(self.d)

    def end(self) -> None:
        """Trouble is over: everything that is open is given up or received, and time does the rest."""
        self.trouble = 0.0
        self.world.run(30.0)
        for key in sorted(self.open):
            self.p.abort(key)
        self.world.run(400.0)
        self.world.settle()


def test_kept_prompts_are_given_back_whatever_happens() -> None:
    delivered = 0
    for seed in range(60):
        chance = Chance(seed)
        for _ in range(_MOVES):
            chance.move()
        chance.end()
        assert not chance.d.sources, f"seed {seed}: {chance.d} still keeps {list(chance.d.sources)}"
        delivered += sum(record.outcome is Outcome.DELIVERED and record.nbytes > 0 for record in chance.p.records)
    assert delivered > 15, "too little of what happens is what should"
