"""One engine as the router shows it: in the admin API, in metrics, and to the other workers on its port."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvpush.router.breaker import BreakerState
from kvpush.router.config import EngineRole
from kvpush.router.engine import Duty, Engine

_WORST_LAST = (BreakerState.CLOSED, BreakerState.TRYING, BreakerState.OPEN)


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one engine. `served` and `failed` count legs since the router started.

    `lost_prompts` is the engine's own count at the last poll.
    """

    role: EngineRole
    url: str
    duty: Duty
    breaker: BreakerState
    is_up: bool
    takes_legs: bool
    problem: str
    requests: int
    tokens: int
    unwritten_tokens: int
    served: int
    failed: dict[str, int]
    lost_prompts: float | None
    engine_id: str | None
    control: str | None


def view(engine: Engine) -> EngineView:
    """What this process knows of an engine."""
    identity = engine.identity
    return EngineView(
        role=engine.role,
        url=engine.url,
        duty=engine.duty,
        breaker=engine.breaker.state,
        is_up=engine.sample is not None,
        takes_legs=engine.sample is not None and engine.duty is Duty.ON and engine.breaker.allows(time.monotonic()),
        problem=engine.problem,
        requests=engine.requests,
        tokens=engine.tokens,
        unwritten_tokens=engine.unwritten_tokens,
        served=engine.served,
        failed={str(cause): count for cause, count in engine.failed.items()},
        lost_prompts=engine.sample.lost_prompts if engine.sample else None,
        engine_id=identity.target.engine_id if identity else None,
        control=str(identity.target.address) if identity else None,
    )


def joined(lists: Iterable[Sequence[EngineView]]) -> list[EngineView]:
    """What several processes know of their engines: one view for each engine, in the order they were seen."""
    by_engine: dict[tuple[EngineRole, str], list[EngineView]] = {}
    for views in lists:
        for one in views:
            by_engine.setdefault((one.role, one.url), []).append(one)
    return [_one(views) for views in by_engine.values()]


def _one(views: list[EngineView]) -> EngineView:
    """Each process counts its own legs, so these add up; each judges for itself, and then the worst is true."""
    first = views[0]
    if len(views) == 1:
        return first
    return EngineView(
        role=first.role,
        url=first.url,
        duty=Duty.ON if all(one.duty is Duty.ON for one in views) else Duty.DRAINING,
        breaker=max((one.breaker for one in views), key=_WORST_LAST.index),
        is_up=all(one.is_up for one in views),
        takes_legs=all(one.takes_legs for one in views),
        problem=next((one.problem for one in views if one.problem), ""),
        requests=sum(one.requests for one in views),
        tokens=sum(one.tokens for one in views),
        unwritten_tokens=sum(one.unwritten_tokens for one in views),
        served=sum(one.served for one in views),
        failed=_summed(one.failed for one in views),
        lost_prompts=_latest(one.lost_prompts for one in views),
        engine_id=next((one.engine_id for one in views if one.engine_id), None),
        control=next((one.control for one in views if one.control), None),
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _latest(counts: Iterable[float | None]) -> float | None:
    """All have read the same counter of the engine, at different times; it only grows."""
    return max((count for count in counts if count is not None), default=None)
