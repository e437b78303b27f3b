"""Sends one request through each pair of engines and looks whether KV really moved.

A wrong port, role or connector makes a decode engine compute every prompt itself: the texts are right, nobody
notices, and the prefill engines idle. So the router is not ready before every pair it has found at its start has
moved tokens, by the decode engine's own count of them; pairs that appear later are checked too.
"""

import asyncio
import logging
import random
import time

import msgspec

from kvpush.core.ids import Key
from kvpush.router.answers import LegFailed
from kvpush.router.asked import parse_asked
from kvpush.router.body import Route
from kvpush.router.config import Connector, EngineRole, RouterConfig
from kvpush.router.discovery import poll_once
from kvpush.router.dispatch import Dispatch, Path
from kvpush.router.engine import Engine
from kvpush.router.fleet import Fleet
from kvpush.router.journey import new_transfer_id
from kvpush.router.pair import Delivery, Legs
from kvpush.router.timeline import Timeline
from kvpush.router.upstream import Upstream

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 48
COUNT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 60.0
RETRY_S = 2.0
_HINT = "The log of the decode engine says why: look for 'transfer ended' and 'takes part in no transfer'."
_TOKEN_IDS = range(3, 250)

_Pair = tuple[str, int, str, int]


class SelfCheck:
    """Owned by the event loop's thread. `run` it as a task."""

    def __init__(self, config: RouterConfig, fleet: Fleet, legs: Legs, upstream: Upstream) -> None:
        self._config = config
        self._fleet = fleet
        self._legs = legs
        self._upstream = upstream
        self._results: dict[_Pair, str] = {}
        self._has_passed = False

    def problems(self) -> list[str]:
        """Why the router should not be called ready; empty when it may."""
        found = {_pair(p, d): f"{p.url} to {d.url}" for p, d in self._pairs()}
        if self._has_passed and any(self._results.get(pair) == "" for pair in found):
            return []
        bad = {pair: self._results.get(pair, "not checked yet") for pair in found}
        return [f"self-check from {found[pair]}: {problem}" for pair, problem in bad.items() if problem]

    async def run(self) -> None:
        """Check every pair that has not passed, until cancelled."""
        while True:
            for prefill, decode in self._pairs():
                if self._results.get(_pair(prefill, decode)) != "":
                    await self._check(prefill, decode)
            if self._pairs() and not self.problems():
                self._has_passed = True
            failed = any(self._results.get(_pair(*engines)) for engines in self._pairs())
            await asyncio.sleep(RETRY_S if failed else self._config.poll_s)

    def _pairs(self) -> list[tuple[Engine, Engine]]:
        usable = self._fleet.usable
        return [(p, d) for p in usable(EngineRole.PREFILL) for d in usable(EngineRole.DECODE)]

    async def _check(self, prefill: Engine, decode: Engine) -> None:
        pair = _pair(prefill, decode)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                problem = await self._move(prefill, decode)
        except LegFailed as failure:
            problem = self._with_hint(f"{failure}.")
        except TimeoutError:
            problem = f"no answer within {REQUEST_TIMEOUT_S:g} s"
        if problem and self._results.get(pair) != problem:
            logger.error("self-check from %s to %s failed: %s", prefill.url, decode.url, problem)
        elif not problem:
            logger.info("self-check from %s to %s: KV moved", prefill.url, decode.url)
        self._results[pair] = problem

    async def _move(self, prefill: Engine, decode: Engine) -> str:
        await poll_once(self._upstream, decode, COUNT_TIMEOUT_S)
        before = _moved(decode)
        if before is None:
            return "the decode engine's /metrics does not count tokens from other engines"
        delivery = await self._ask(prefill, decode)
        try:
            while await delivery.stream.next_chunk():
                pass
            delivery.finish()
        finally:
            delivery.close()
        deadline = time.monotonic() + COUNT_TIMEOUT_S
        while time.monotonic() < deadline:
            await poll_once(self._upstream, decode, COUNT_TIMEOUT_S)
            if (_moved(decode) or 0.0) > before:
                return ""
            await asyncio.sleep(0.1)
        why = "; ".join(map(str, delivery.dispatch.failures))
        return self._with_hint(f"no KV moved, the decode engine computed the prompt itself. {why}".strip())

    def _with_hint(self, problem: str) -> str:
        """vLLM tells a client nothing of why KV did not come."""
        return f"{problem} {_HINT}" if self._config.connector is Connector.KVPUSH else problem

    async def _ask(self, prefill: Engine, decode: Engine) -> Delivery:
        prompt = random.sample(_TOKEN_IDS, PROMPT_TOKENS)
        body = msgspec.json.encode({"prompt": prompt, "max_tokens": 1, "temperature": 0})
        asked = parse_asked(Route.COMPLETIONS, body)
        key = Key(new_transfer_id())
        headers = {"Content-Type": "application/json", "X-Request-Id": key.transfer_id}
        if self._config.engine_api_key:
            headers["Authorization"] = f"Bearer {self._config.engine_api_key}"
        dispatch = Dispatch(
            asked=asked,
            key=key,
            connector=self._config.connector,
            path=Path.PD,
            headers=headers,
            timeline=Timeline(),
            prefill=prefill.admit(asked),
            decode=decode.admit(asked),
        )
        return await self._legs.open_pair(dispatch)


def _pair(prefill: Engine, decode: Engine) -> _Pair:
    """A restarted engine makes a new pair."""
    return (prefill.url, prefill.generation, decode.url, decode.generation)


def _moved(decode: Engine) -> float | None:
    return decode.sample.moved_tokens if decode.sample else None
