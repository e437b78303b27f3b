"""From answers to figures, defined as in `vllm bench serve`.

TTFT: from sending to the first text. E2EL: from sending to the end of the stream. TPOT: (E2EL - TTFT) / (output
tokens - 1), one value per request. ITL: between neighbouring chunks of text, all of them pooled.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpush.bench.client import Answer

Values = NDArray[np.float64]

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
_BOOTSTRAP = 2000


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good when it takes at most this long (milliseconds)."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 30.0


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Quotient of two means with the 95 % interval of a bootstrap over pairs of requests."""

    ratio: float
    low: float
    high: float


def ttft_ms(answer: Answer) -> float:
    """Time to first token."""
    return (answer.chunks[0] - answer.sent) * 1e3


def e2el_ms(answer: Answer) -> float:
    """End-to-end latency."""
    return (answer.chunks[-1] - answer.sent) * 1e3


def tpot_ms(answer: Answer) -> float:
    """Time per output token after the first; 0 for a single token."""
    return (e2el_ms(answer) - ttft_ms(answer)) / max(1, answer.output_tokens - 1)


def values(answers: Sequence[Answer], metric: str) -> Values:
    """One metric's values in milliseconds over the answers that succeeded."""
    good = [answer for answer in answers if not answer.error and answer.chunks]
    match metric:
        case "ttft":
            return np.array([ttft_ms(answer) for answer in good])
        case "e2el":
            return np.array([e2el_ms(answer) for answer in good])
        case "tpot":
            return np.array([tpot_ms(answer) for answer in good if answer.output_tokens > 1])
        case "itl":
            return np.concatenate([np.diff(answer.chunks) * 1e3 for answer in good]) if good else np.array([])
        case _:
            raise ValueError(f"unknown metric {metric}")


def figures(data: Values) -> Figures | None:
    """Mean and percentiles; None of nothing."""
    if not len(data):
        return None
    median, p90, p99 = (float(value) for value in np.percentile(data, PERCENTILES))
    return Figures(mean=float(data.mean()), median=median, p90=p90, p99=p99)


def goodput(answers: Sequence[Answer], slo: Slo) -> float:
    """Requests per second that met the SLO, over the time from the first sent to the last answered."""
    if not answers:
        return 0.0
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    good = sum(1 for a in answers if not a.error and ttft_ms(a) <= slo.ttft_ms and tpot_ms(a) <= slo.tpot_ms)
    return good / seconds if seconds > 0 else 0.0


def paired_ratio(ours: Values, theirs: Values, seed: int = 0) -> Ratio | None:
    """mean(theirs) / mean(ours) over pairs: value i of both is the same prompt at the same arrival time."""
    if not len(ours) or len(ours) != len(theirs) or not ours.mean() > 0:
        return None
    picks = np.random.default_rng(seed).integers(0, len(ours), (_BOOTSTRAP, len(ours)))
    ratios = theirs[picks].mean(axis=1) / ours[picks].mean(axis=1)
    low, high = (float(value) for value in np.percentile(ratios, (2.5, 97.5)))
    return Ratio(ratio=float(theirs.mean() / ours.mean()), low=low, high=high)
