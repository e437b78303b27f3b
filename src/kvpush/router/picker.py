"""Which engine gets the next leg: pure scores over the engines' records.

A prefill engine's score is the prompt tokens it would have to compute before this prompt is done: what is in flight
there, what others have queued there, and this prompt without its known prefix. So a cached prefix wins just as
long as it saves more than the queue in front of it costs.

A decode engine's score is its requests (each one makes every step longer), plus its KV pool's fill as it will be
when everything promised has arrived, less a bonus for a known prefix, which saves a transfer but no compute.

The router's own legs are counted exactly. A poll is always stale, and is used only for what other routers send.
"""

import random
from collections.abc import Sequence

from kvpush.router.asked import Asked
from kvpush.router.config import EngineRole
from kvpush.router.engine import Engine

SMALL_FLEET = 4
"""Up to this many engines all are compared; of more, two at random, so that many routers do not herd."""

PREFIX_BONUS = 1.5
"""How many more requests a decode engine may have before a fully known prompt goes elsewhere."""

FULL_POOL = 0.95
"""A KV pool filled more than this will preempt: such an engine is taken only when all are like it."""


def pick(engines: Sequence[Engine], asked: Asked, rng: random.Random) -> Engine | None:
    """The best of the engines, which all have one role; None when there are none."""
    if not engines:
        return None
    few = engines if len(engines) <= SMALL_FLEET else rng.sample(list(engines), 2)
    return min(few, key=lambda engine: (*score(engine, asked), rng.random()))


def score(engine: Engine, asked: Asked) -> tuple[float, float]:
    """Lower is better; the second number breaks ties."""
    if engine.role is EngineRole.PREFILL:
        return (prefill_score(engine, asked), engine.requests)
    return (decode_score(engine, asked), engine.tokens)


def prefill_score(engine: Engine, asked: Asked) -> float:
    """Prompt tokens until this prompt is done there."""
    queued = engine.tokens + engine.foreign_requests * max(asked.tokens, 1)
    return queued + asked.tokens * (1.0 - _known(engine, asked))


def decode_score(engine: Engine, asked: Asked) -> float:
    """Requests there, in units of one request."""
    requests = engine.requests + engine.foreign_requests
    fill = engine.kv_fill(asked.tokens)
    overfull = 1e6 if fill > FULL_POOL else 0.0
    return requests + fill + overfull - PREFIX_BONUS * _known(engine, asked)


def _known(engine: Engine, asked: Asked) -> float:
    if not asked.prefix:
        return 0.0
    return engine.prefixes.matched(asked.prefix) / len(asked.prefix)
