"""Keeps each engine's record fresh: one polling task per engine, sooner when a leg has had trouble."""

import asyncio
import logging

from kvpush.router.answers import Cause, LegFailed
from kvpush.router.engine import Engine
from kvpush.router.scrape import parse_metrics
from kvpush.router.upstream import Upstream

logger = logging.getLogger(__name__)

_MIN_PAUSE_S = 0.05


async def poll_once(upstream: Upstream, engine: Engine, timeout_s: float) -> None:
    """Read the engine's metrics into its record. An engine that answers, but has none, is up all the same."""
    try:
        page = await upstream.metrics_page(engine, timeout_s)
    except LegFailed as failure:
        if failure.cause is not Cause.REFUSED:
            _lost(engine, failure)
            return
        _warn_without_metrics(engine, failure)
        page = ""
    sample = parse_metrics(page)
    if engine.sample is None or engine.sample.identity != sample.identity:
        logger.info("%s engine %s is up: %s", engine.role, engine.url, sample.identity or "no kvpush identity")
    engine.polled(sample)


def _lost(engine: Engine, failure: LegFailed) -> None:
    if engine.sample is not None:
        logger.warning("%s engine %s is gone: %s", engine.role, engine.url, failure)
    engine.unreachable(str(failure))


def _warn_without_metrics(engine: Engine, failure: LegFailed) -> None:
    if engine.sample is None:
        logger.warning(
            "%s engine %s has no /metrics (status %d): its load is known only by what this router sends there",
            *(engine.role, engine.url, failure.answer.status),
        )


async def poll_forever(upstream: Upstream, engine: Engine, every_s: float) -> None:
    """Poll until cancelled: every `every_s` seconds, and at once when `engine.refresh` is set."""
    while True:
        engine.refresh.clear()
        await poll_once(upstream, engine, timeout_s=max(every_s * 4, 2.0))
        engine.refresh.clear()
        await asyncio.sleep(min(_MIN_PAUSE_S, every_s))
        try:
            async with asyncio.timeout(every_s):
                await engine.refresh.wait()
        except TimeoutError:
            continue
