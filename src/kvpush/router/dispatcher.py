"""From a parsed request to an answer that has begun: choose engines, dispatch, and retry once.

Every dispatch has its own transfer id, and a retry begins only after both legs of the failed one have ended: no two
live legs ever carry the same id.
"""

import secrets
from collections.abc import Mapping

from kvpush.core.ids import Key, TransferId
from kvpush.router.answers import LegFailed, RequestRefused, error_answer
from kvpush.router.asked import Asked
from kvpush.router.config import EngineRole, RouterConfig
from kvpush.router.connectors import local_reason
from kvpush.router.fleet import Fleet
from kvpush.router.pair import Delivery, Dispatch, open_local, open_pair
from kvpush.router.upstream import Upstream

TRIES = 2


def new_transfer_id() -> TransferId:
    """128 random bits; never reused."""
    return TransferId(secrets.token_hex(16))


class Dispatcher:
    """Owned by the event loop's thread."""

    def __init__(self, config: RouterConfig, fleet: Fleet, upstream: Upstream) -> None:
        self._config = config
        self._fleet = fleet
        self._upstream = upstream

    async def open(self, asked: Asked, headers: Mapping[str, str], trail: list[Dispatch]) -> Delivery:
        """Serve a request up to its first byte; each try is added to `trail`.

        Raises `RequestRefused` when no engine can be asked, `LegFailed` when the last try failed.
        """
        avoid = dict.fromkeys(EngineRole, "")
        while True:
            dispatch = self._plan(asked, headers, avoid)
            trail.append(dispatch)
            try:
                opened = open_pair if dispatch.prefill else open_local
                return await opened(self._upstream, dispatch)
            except LegFailed as failure:
                if len(trail) >= TRIES or not self._may_retry(failure):
                    raise
                avoid[failure.role] = failure.engine

    def _may_retry(self, failure: LegFailed) -> bool:
        """Another engine can be asked; or nobody can know that this one has seen the request."""
        others = [engine for engine in self._fleet.usable(failure.role) if engine.url != failure.engine]
        return failure.engines_fault and bool(others)

    def _plan(self, asked: Asked, headers: Mapping[str, str], avoid: Mapping[EngineRole, str]) -> Dispatch:
        key = Key(new_transfer_id())
        is_local = local_reason(self._config.connector, asked) is not None
        prefill = None if is_local else self._fleet.choose(EngineRole.PREFILL, avoid[EngineRole.PREFILL])
        decode = self._fleet.choose(EngineRole.DECODE, avoid[EngineRole.DECODE])
        if decode is None or (prefill is None and not is_local):
            problems = "; ".join(self._fleet.problems())
            raise RequestRefused(error_answer(503, f"No engine can serve this: {problems}", "service_unavailable"))
        return Dispatch(
            asked=asked,
            key=key,
            connector=self._config.connector,
            decode=decode,
            prefill=prefill,
            identity=prefill.identity if prefill else None,
            headers={**headers, "X-Request-Id": key.transfer_id},
        )
