"""One log line per request: JSON, so that the lines of router and engines can be joined by transfer id."""

import logging

import msgspec

from kvpush.router.journey import Ending, Journey

logger = logging.getLogger("kvpush.router.request")


class RequestLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the line says. `earlier_turn` is the id under which one was asked for, `reused_tokens` how many prompt
    tokens it has saved the prefill engine. `ms` maps stages to milliseconds since the request arrived; those of a retry
    replace those of the try before it."""

    ending: Ending
    route: str = ""
    path: str = ""
    transfer_id: str = ""
    client_id: str = ""
    prefill: str = ""
    decode: str = ""
    tokens: int = 0
    earlier_turn: str = ""
    reused_tokens: int = 0
    tries: int = 0
    failures: list[str] = []
    ms: dict[str, float] = {}


def log_request(journey: Journey) -> None:
    """Write the line; nothing is built when nobody reads it."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", msgspec.json.encode(request_line(journey)).decode())


def request_line(journey: Journey) -> RequestLine:
    """The line for a request that has ended."""
    last = journey.trail[-1] if journey.trail else None
    return RequestLine(
        ending=journey.ending,
        route=journey.asked.route,
        path=last.path if last else "",
        transfer_id=last.key.transfer_id if last else "",
        client_id=journey.client_id,
        prefill=last.prefill.engine.url if last and last.prefill else "",
        decode=last.decode.engine.url if last and last.decode else "",
        tokens=journey.asked.tokens,
        earlier_turn=last.reuse.key.transfer_id if last and last.reuse else "",
        reused_tokens=last.reused_tokens if last else 0,
        tries=len(journey.trail),
        failures=[str(failure) for dispatch in journey.trail for failure in dispatch.failures],
        ms=journey.timeline.milliseconds(),
    )
