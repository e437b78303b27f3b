"""Breadth-first search over a model's states, and the way out of each of them."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from core.bounds import FAULTS, Bounds
from core.flight import D
from core.model import TARGET, Action, Model

from kvpush.core.commands import Abort, Expect
from kvpush.core.ids import Key, RequestId, TransferId

_RARE = (*FAULTS, "withdraw", "abort", "time")
_RARELY = 0.2
"""How often a walk takes what is rare into account."""
_WAY_OUT = 400
"""A fair run that has not ended after so many steps never will."""


Say = Callable[[str, object], None]
"""How a test has something printed at the end of the run."""


class Violation(AssertionError):
    """A rule was broken; says what led to it."""


@dataclass
class Search:
    """What was seen. `came_by` is how each state was reached, `live` the states from which everything ends,
    `seen` those that a walk has come by."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    is_complete: bool = True
    came_by: dict[int, tuple[int, Action | None]] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        whole = "all of" if self.is_complete else "only"
        states = self.states or len(self.seen)
        return f"{whole} {states:,} states, {self.transitions:,} transitions, up to {self.depth} steps deep"


def explore(bounds: Bounds, most_states: int, kind: type[Model] = Model) -> Search:
    """Visit states in order of their distance from the start, at most so many. Raises `Violation`."""
    search = Search()
    start = connected(bounds, kind)
    mark = hash(start.fingerprint())
    search.came_by[mark] = (0, None)
    frontier = deque([(start, mark, 0)])
    while frontier:
        model, mark, depth = frontier.popleft()
        search.states += 1
        search.depth = depth
        _find_way_out(search, model, mark)
        for after, reached in _successors(search, model, mark):
            if len(search.came_by) > most_states:
                search.is_complete = False
            else:
                search.came_by[reached] = (mark, after[1])
                frontier.append((after[0], reached, depth + 1))
    return search


def say(name: str, search: Search, record_property: Say) -> None:
    """Have the outcome of a search printed."""
    record_property("said", f"model check, {name}: {search}")


def walk(bounds: Bounds, seeds: range, steps: int, kind: type[Model] = Model) -> Search:
    """Go at random, and after so many steps find the way out: deeper than breadth-first gets. Raises `Violation`."""
    search = Search(is_complete=False)
    for seed in seeds:
        luck, model, mark = Random(seed), connected(bounds, kind), seed
        search.came_by[mark] = (0, None)
        for _ in range(steps):
            action = _at_random(model, luck)
            after = _try(search, model, mark, action)
            reached = hash((seed, search.transitions))
            search.came_by[reached] = (mark, action)
            model, mark = after, reached
            search.seen.add(hash(model.fingerprint()))
        search.depth = steps
        _find_way_out(search, model, mark)
    return search


def _at_random(model: Model, luck: Random) -> Action:
    """Mostly what brings a transfer on: else faults are spent, and prompts given up, before anything is under way."""
    choices = list(model.choices())
    ordinary = [action for action in choices if not " ".join(action).startswith(_RARE)]
    return luck.choice(choices if not ordinary or luck.random() < _RARELY else ordinary)


def connected(bounds: Bounds, kind: type[Model] = Model) -> Model:
    """The state in which the two know each other and have nothing to do."""
    model = kind(bounds)
    stranger = Key(TransferId("0" * 31 + "f"))
    for command in (Expect(stranger, RequestId("r"), TARGET), Abort(stranger)):
        model.execute(D, command)
        while model.up or model.down:
            model = model.step(_fair_choice(model))
    return model


def _successors(search: Search, model: Model, mark: int) -> Iterator[tuple[tuple[Model, Action], int]]:
    for action in model.choices():
        after = _try(search, model, mark, action)
        reached = hash(after.fingerprint())
        if reached not in search.came_by:
            yield (after, action), reached


def _try(search: Search, model: Model, mark: int, action: Action) -> Model:
    search.transitions += 1
    try:
        return model.step(action)
    except AssertionError as error:
        raise Violation(_story(search, mark, [action], error)) from error


def _find_way_out(search: Search, model: Model, mark: int) -> None:
    """When the channel is fair and faults stop, everything ends: on a path to a state of which that is known."""
    path, actions, at = [mark], [], mark
    while at not in search.live and not model.over:
        action = _fair_choice(model)
        actions.append(action)
        try:
            assert len(actions) < _WAY_OUT, "R4: it does not end"
            model = model.step(action)
        except AssertionError as error:
            raise Violation(_story(search, mark, actions, error)) from error
        at = hash(model.fingerprint())
        path.append(at)
    search.live.update(path)


def _fair_choice(model: Model) -> Action:
    """Everything under way arrives, in order; then time passes."""
    order = ("wake p", "up", "down", "land", "notice", "time")
    fair = [action for action in model.choices() if action[0] in order]
    return min(fair, key=lambda action: order.index(action[0]))


def _story(search: Search, mark: int, last: list[Action], error: AssertionError) -> str:
    actions: list[Action] = []
    while (step := search.came_by[mark])[1] is not None:
        actions.append(step[1])
        mark = step[0]
    story = [" ".join(action) for action in [*reversed(actions), *last]]
    return f"{error}\n" + "\n".join(f"{i + 1:3} {action}" for i, action in enumerate(story))
