"""Where a request's time to first token went, from one clock: client, engines and transfer threads of one host.

The stages are intervals between neighbouring marks, so they add up to the TTFT. A mark that came before its predecessor
(a registration that waited for the prefill, say) cost nothing: its stage is 0.

    router       client has sent .. request is in P's engine         (router, and P's API server)
    p_queue      .. P launches its first step
    p_compute    .. P's device has finished the prompt
    register     .. D's registration is at P                          (0 when it was early, as it should be)
    match        .. P's transfer thread has both it and the blocks
    post         .. the first write is posted; with pull, D has heard where to read, and posts
    wire         .. the last write, or read, is done
    notice       .. D's transfer thread has the notice; with pull, P's word that what was read is right
    d_wakeup     .. D launches the request's first step
    d_step       .. D's device has finished it
    reply        .. client has the token                              (D's API server, and router)

Where there are no transfer records (connectors of vLLM's own), `transfer` stands for everything from p_compute to D's
first launch. One engine alone has p_queue (with the way there), p_compute and reply. Stages that come after a first
token that the router has sent early are 0.
"""

from collections.abc import Callable

from kvpush.bench.logs import Leg, RoundLogs
from kvpush.core.events import TransferRecord

STAGES = (
    "router",
    "p_queue",
    "p_compute",
    "register",
    "match",
    "post",
    "wire",
    "notice",
    "transfer",
    "d_wakeup",
    "d_step",
    "reply",
)

_Marks = list[tuple[str, float | None]]


def split_ttft(logs: RoundLogs, transfer_id: str, sent: float, first_token: float) -> dict[str, float]:
    """Milliseconds per stage; empty when the request is in no log. Times are monotonic seconds."""
    decode = logs.decode.get(transfer_id)
    prefill = logs.prefill.get(transfer_id)
    if prefill is not None and prefill.steps and decode is not None and decode.steps:
        marks = _pair(prefill, decode, logs.sent.get(transfer_id), logs.received.get(transfer_id))
    elif decode is not None and decode.steps:
        marks = [("p_queue", decode.steps[0].launched), ("p_compute", decode.steps[-1].end)]
    else:
        return {}
    return _intervals(marks, sent, first_token)


def _pair(prefill: Leg, decode: Leg, sent: TransferRecord | None, received: TransferRecord | None) -> _Marks:
    transfer: _Marks = [("transfer", decode.steps[0].launched)]
    if sent is not None and received is not None:
        transfer = [
            ("register", sent.at.get("registered")),
            ("match", _pick(max, sent.at.get("final"), sent.at.get("registered"))),
            ("post", sent.at.get("posted", received.at.get("posted"))),
            # the notice may be seen before the sender sees that its write is done
            ("wire", _pick(min, sent.at.get("written"), received.at.get("noticed"), received.at.get("read"))),
            ("notice", received.at.get("noticed", received.at.get("ended"))),
            ("d_wakeup", decode.steps[0].launched),
        ]
    return [
        ("router", prefill.arrived),
        ("p_queue", prefill.steps[0].launched),
        ("p_compute", prefill.steps[-1].end),
        *transfer,
        ("d_step", decode.steps[-1].end),
    ]


def _pick(which: Callable[[list[float]], float], *times: float | None) -> float | None:
    known = [at for at in times if at is not None]
    return which(known) if known else None


def _intervals(marks: _Marks, sent: float, first_token: float) -> dict[str, float]:
    split: dict[str, float] = {}
    last = sent
    for stage, at in [*marks, ("reply", first_token)]:
        until = last if at is None else min(max(at, last), first_token)
        split[stage] = (until - last) * 1e3
        last = until
    return split
