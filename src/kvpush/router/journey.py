"""One request's way through the router: its dispatches, what the next one should avoid, and how it all ended."""

import secrets
from collections.abc import Mapping
from enum import StrEnum

from kvpush.core.ids import Key, TransferId
from kvpush.router.answers import LegFailed
from kvpush.router.asked import Asked
from kvpush.router.config import EngineRole, RouterConfig
from kvpush.router.conversations import Beginnings
from kvpush.router.dispatch import Dispatch, Path, may_be_prefills_fault
from kvpush.router.timeline import Timeline


class Ending(StrEnum):
    """How a request ended, as its client saw it."""

    COMPLETE = "complete"
    REFUSED = "refused"  # a complete error answer
    BROKEN_OFF = "broken_off"  # an error after the first byte
    CLIENT_LEFT = "client_left"
    CLIENT_STALLED = "client_stalled"  # it stopped reading for too long


def new_transfer_id() -> TransferId:
    """128 random bits; never reused."""
    return TransferId(secrets.token_hex(16))


class Journey:
    """A request that ends without a word has lost its client: that is what `ending` says until it is known better.

    `client_id` is the client's own X-Request-Id: it comes back with the answer, the engines get the transfer id.
    `tenant` is whoever asks; `beginnings` are those of what was asked, when its conversation may go on.
    """

    def __init__(
        self, asked: Asked, headers: Mapping[str, str], timeline: Timeline, client_id: str = "", tenant: str = ""
    ) -> None:
        self.asked = asked
        self.headers = headers
        self.timeline = timeline
        self.client_id = client_id
        self.tenant = tenant
        self.beginnings: Beginnings = ()
        self.trail: list[Dispatch] = []
        self.ending = Ending.CLIENT_LEFT
        self.avoid = dict.fromkeys(EngineRole, "")

    def avoid_after(self, failure: LegFailed) -> None:
        """Next time, not the engine that failed; nor the prefill engine, when it may have been the cause."""
        self.avoid[failure.role] = failure.engine
        prefill = self.trail[-1].prefill
        if prefill is not None and may_be_prefills_fault(failure):
            self.avoid[EngineRole.PREFILL] = prefill.engine.url

    def dispatch(self, config: RouterConfig, path: Path) -> Dispatch:
        """The next try."""
        key = Key(new_transfer_id())
        headers = {**self.headers, "X-Request-Id": key.transfer_id}
        self.trail.append(
            Dispatch(
                asked=self.asked,
                key=key,
                connector=config.connector,
                path=path,
                headers=headers,
                timeline=self.timeline,
            )
        )
        return self.trail[-1]
