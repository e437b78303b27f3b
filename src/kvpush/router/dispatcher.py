"""From a parsed request to an answer that has begun: choose engines, dispatch, and retry once.

Every dispatch has its own transfer id, and a retry begins only after both legs of the failed one have ended: no two
live legs ever carry the same id.
"""

from functools import partial

from kvpush.core.ids import Key
from kvpush.router.admission import Admission
from kvpush.router.answers import Cause, LegFailed, RequestRefused, error_answer
from kvpush.router.asked import Asked, Local
from kvpush.router.config import Connector, ConversationMode, EngineRole, FirstTokenMode, PrefillLoss, RouterConfig
from kvpush.router.connectors import local_reason
from kvpush.router.conversations import Conversations, beginnings_of
from kvpush.router.dispatch import Dispatch, Path
from kvpush.router.engine import Seat
from kvpush.router.first_token import Fate, is_certain
from kvpush.router.fleet import Fleet
from kvpush.router.journey import Journey, new_transfer_id
from kvpush.router.pair import Delivery, Legs
from kvpush.router.siblings import KeptTurn, Siblings

TRIES = 2


class Dispatcher:
    """Owned by the event loop's thread."""

    def __init__(self, config: RouterConfig, fleet: Fleet, legs: Legs) -> None:
        self._config = config
        self._fleet = fleet
        self._legs = legs
        self._conversations = Conversations(config.max_conversations)
        self.siblings = Siblings(config.place, self._heard)
        self.admission = Admission(fleet.room, config.unwritten_fraction, config.max_waiting, config.queue_timeout_s)

    def local_reason(self, asked: Asked) -> Local | None:
        """Why a request gets no prefill leg; None when it gets one."""
        reason = local_reason(self._config.connector, asked)
        if reason is None and asked.tokens < self._config.local_below_tokens:
            return Local.SHORT
        return reason

    async def open(self, journey: Journey) -> Delivery:
        """Serve a request up to its first byte.

        Raises `RequestRefused` when no engine can be asked, `LegFailed` when the last try failed.
        """
        path = Path.PD if self.local_reason(journey.asked) is None else Path.LOCAL
        if path is Path.PD and self._must_recompute():
            path = Path.RECOMPUTED
        while True:
            try:
                return await self._try(journey, path)
            except LegFailed as failure:
                path = self._next_path(journey, path, failure)

    def _must_recompute(self) -> bool:
        return self._config.prefill_loss is PrefillLoss.RECOMPUTE and not self._fleet.usable(EngineRole.PREFILL)

    def _next_path(self, journey: Journey, path: Path, failure: LegFailed) -> Path:
        """How to go on after a failed try; raises the failure again when that makes no sense."""
        if not failure.engines_fault or failure.cause is Cause.TIMEOUT:
            raise failure
        journey.avoid_after(failure)
        # a connection may break only because the engine had just closed it for idleness
        is_worth_it = failure.cause is Cause.BROKEN or self._has_other(journey)
        if len(journey.trail) < TRIES and is_worth_it:
            return path
        if self._config.prefill_loss is PrefillLoss.RECOMPUTE and failure.role is EngineRole.PREFILL:
            return Path.RECOMPUTED
        raise failure

    def _has_other(self, journey: Journey) -> bool:
        """Whether any engine that is to be avoided can be."""
        return any(
            engine.url != url for role, url in journey.avoid.items() if url for engine in self._fleet.usable(role, url)
        )

    async def _try(self, journey: Journey, path: Path) -> Delivery:
        dispatch = journey.dispatch(self._config, path)
        if path is not Path.PD:
            dispatch.decode = await self._decode_seat(journey)
            return await self._legs.open_local(dispatch)
        self._continue_conversation(journey, dispatch)
        dispatch.first_token = self._first_token(journey.asked)
        if self._config.late_decode:
            dispatch.prefill = self._prefill_seat(journey)
            eta_s = dispatch.prefill.engine.prefill_eta_s(dispatch.prefill.queue_tokens)
            dispatch.hold_decode_s = max(eta_s - self._config.late_decode_lead_s, 0.0)
            return await self._legs.open_pair(dispatch, partial(self._decode_seat, journey))
        dispatch.decode = await self._decode_seat(journey)
        try:
            dispatch.prefill = self._prefill_seat(journey)
        except RequestRefused:
            dispatch.release()
            raise
        return await self._legs.open_pair(dispatch, partial(self._decode_seat, journey))

    def _continue_conversation(self, journey: Journey, dispatch: Dispatch) -> None:
        """Let the prefill engine ask for an earlier turn, and the decode engine keep this one."""
        if self._config.conversations is ConversationMode.OFF or self._config.connector is not Connector.KVPUSH:
            return
        journey.beginnings = beginnings_of(journey.asked, journey.tenant)
        if journey.beginnings:
            dispatch.reuse = self._conversations.take(journey.beginnings)
            dispatch.keep = Key(new_transfer_id())

    def _first_token(self, asked: Asked) -> Fate | None:
        """What is known of the first token before any leg is sent; None when it need not be sent early."""
        if self._config.first_token is FirstTokenMode.DECODE or not asked.stream:
            return None
        return Fate.UNDECIDED if is_certain(asked.fields) else Fate.EXCLUDED

    def answered(self, journey: Journey) -> None:
        """The engine's answer is complete: the conversation may go on, as soon as the client has it."""
        last = journey.trail[-1]
        if last.keep is not None and last.decode is not None:
            self._conversations.remember(journey.beginnings, last.keep, last.decode.engine)
            beginning = journey.beginnings[-1]
            self.siblings.tell(KeptTurn(beginning, last.keep.transfer_id, last.decode.engine.url))

    def _heard(self, turn: KeptTurn) -> None:
        """Another worker's request has been answered to its end."""
        engine = self._fleet.known(turn.engine_url)
        if engine is not None:
            self._conversations.remember((turn.beginning,), Key(turn.transfer_id), engine)

    def _prefill_seat(self, journey: Journey) -> Seat:
        seat = self._fleet.prefill_seat(journey.asked, journey.avoid)
        if seat is None:
            raise self._nobody()
        return seat

    async def _decode_seat(self, journey: Journey) -> Seat:
        engines = partial(self._fleet.usable, EngineRole.DECODE, journey.avoid[EngineRole.DECODE])
        seat = await self.admission.seat(journey.asked, engines)
        if seat is None:
            raise self._nobody()
        return seat

    def _nobody(self) -> RequestRefused:
        problems = "; ".join(self._fleet.problems())
        return RequestRefused(error_answer(503, f"No engine can serve this: {problems}", "service_unavailable"))
