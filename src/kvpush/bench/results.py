"""The JSON that a comparison writes: everything that the report is drawn from."""

from enum import StrEnum

import msgspec

from kvpush.bench.metrics import Figures, Ratio, Slo


class Text(StrEnum):
    """What is known of an answer's text."""

    RIGHT = "right"
    WRONG = "wrong"
    UNCHECKED = "unchecked"


class Sample(msgspec.Struct, kw_only=True):
    """One measured request. `sent` is monotonic seconds; the other times are milliseconds after it.

    `split` maps the stages of the hand-over to milliseconds; they add up to `ttft_ms`.
    """

    connector: str
    input_tokens: int
    output_tokens: int
    load: str
    round: int
    index: int
    request_id: str
    transfer_id: str
    sent: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    chunks_ms: list[float]
    text: Text
    path: str
    error: str
    split: dict[str, float] = {}
    descriptors: int = 0
    nbytes: int = 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU in connector hooks on the engines' threads, in microseconds, without what the clock itself takes (`counted`:
    with it); how long the longest call took, whatever it did meanwhile; and CPU of all processes in cores."""

    prefill_us_per_request: float
    prefill_us_per_step: float
    prefill_counted_us_per_request: float
    decode_us_per_request: float
    decode_us_per_step: float
    decode_counted_us_per_request: float
    longest_hook_us: float
    cpu_cores: float


class Row(msgspec.Struct, kw_only=True):
    """One connector at one input length and load. Times in milliseconds, goodput in requests per second.

    `ratios`: this connector's mean over the reference's, request by request. `overhead_ms`: its mean TTFT minus
    that of one engine, at concurrency 1.
    """

    connector: str
    input_tokens: int
    output_tokens: int
    load: str
    rate_per_s: float | None
    requests: int
    errors: int
    wrong_texts: int
    ttft: Figures | None
    tpot: Figures | None
    itl: Figures | None
    e2el: Figures | None
    goodput: float
    ratios: dict[str, Ratio]
    overhead_ms: float | None = None
    split: dict[str, float] = {}
    descriptors: float = 0.0
    cost: Cost | None = None


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """CPU that a connector's cluster takes while nothing is asked of it, in cores, by part."""

    connector: str
    cores: dict[str, float]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A connector's turn that ended before everything was measured."""

    connector: str
    round: int
    error: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran."""

    cpu: str
    cores: int
    memory_gib: float
    system: str


class Report(msgspec.Struct, kw_only=True):
    """A whole comparison. `simulated`: the forward passes took the time that a profile says."""

    simulated: bool
    device: str
    device_source: str
    command: str
    started: str
    seconds: float
    commit: str
    versions: dict[str, str]
    machine: Machine
    seed: int
    rounds: int
    fragmented: bool
    prefix_share: float
    slo: Slo
    saturation_per_s: dict[str, float]
    idle: list[Idle]
    failures: list[Failure]
    summary: list[Row]
    samples: list[Sample]
