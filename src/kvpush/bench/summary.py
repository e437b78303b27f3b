"""From visits to samples and summary rows. Pure, but for the logs that the visits have read."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from kvpush.bench import cost, metrics
from kvpush.bench.client import Answer
from kvpush.bench.contenders import REFERENCE, Contender
from kvpush.bench.cost import CellCost
from kvpush.bench.load import Concurrency, Rate
from kvpush.bench.metrics import Ratio, Slo
from kvpush.bench.plan import Cell
from kvpush.bench.results import Row, Sample, Text
from kvpush.bench.split import split_ttft
from kvpush.bench.visit import Measured, Visited
from kvpush.bench.workload import Prompt
from kvpush.sim import kvfunc
from kvpush.sim.model import word
from kvpush.sim.profile import Profile

_RATIO_METRICS = ("ttft", "tpot", "e2el")


def expected_text(prompt: Prompt, profile: Profile) -> str:
    """What the simulated model answers."""
    planes = profile.planes
    tokens = kvfunc.expected_tokens(prompt.tokens, prompt.output, planes, profile.vocabulary)
    return "".join(f" {word(token)}" for token in tokens)


def make_samples(visited: Visited, measured: Measured, texts: Mapping[int, str]) -> list[Sample]:
    """One cell of one visit; `texts` maps the index of a request to the right text, where it is to be checked."""
    return [_sample(visited, measured, i, answer, texts.get(i)) for i, answer in enumerate(measured.answers)]


def _sample(visited: Visited, measured: Measured, index: int, answer: Answer, right: str | None) -> Sample:
    ok = not answer.error and bool(answer.chunks)
    sent = visited.logs.sent.get(answer.transfer_id)
    split = split_ttft(visited.logs, answer.transfer_id, answer.sent, answer.chunks[0]) if ok else {}
    return Sample(
        connector=visited.visit.contender.value,
        input_tokens=measured.cell.shape.input_tokens,
        output_tokens=answer.output_tokens,
        load=str(measured.cell.load),
        round=visited.visit.round,
        index=index,
        request_id=answer.request_id,
        transfer_id=answer.transfer_id,
        sent=answer.sent,
        ttft_ms=metrics.ttft_ms(answer) if ok else None,
        tpot_ms=metrics.tpot_ms(answer) if ok else None,
        e2el_ms=metrics.e2el_ms(answer) if ok else None,
        chunks_ms=[round((at - answer.sent) * 1e3, 3) for at in answer.chunks],
        text=_judge(answer, right),
        path=answer.path,
        error=answer.error,
        split={stage: round(ms, 3) for stage, ms in split.items()},
        descriptors=sent.descriptors if sent else 0,
        nbytes=sent.nbytes if sent else 0,
    )


def _judge(answer: Answer, right: str | None) -> Text:
    if right is None or answer.error:
        return Text.UNCHECKED
    return Text.RIGHT if answer.text == right else Text.WRONG


def make_rows(visits: Sequence[Visited], samples: Sequence[Sample], slo: Slo) -> list[Row]:
    """A row per contender and cell, with ratios to the reference and the hand-over overhead."""
    answers: dict[tuple[str, int], list[Answer]] = defaultdict(list)
    costs: dict[tuple[str, int], list[CellCost]] = defaultdict(list)
    spans: dict[tuple[str, int], list[float]] = defaultdict(list)
    cells: dict[int, Cell] = {}
    for visited in visits:
        for measured in visited.cells:
            key = (visited.visit.contender.value, measured.cell.index)
            answers[key] += measured.answers
            costs[key].append(measured.cost)
            spans[key].append(metrics.goodput(measured.answers, slo))
            cells[measured.cell.index] = measured.cell
    by_cell = _by_cell(samples)
    rows = []
    for (name, index), own in answers.items():
        mine = by_cell[name, cells[index].shape.input_tokens, str(cells[index].load)]
        row = _row(name, cells[index], own, mine)
        row.goodput = round(float(np.mean(spans[name, index])), 4)
        row.cost = cost.total(costs[name, index])
        _compare(row, own, answers.get((REFERENCE.value, index)), answers.get((Contender.SINGLE.value, index)))
        rows.append(row)
    return sorted(rows, key=lambda row: (row.input_tokens, row.load, row.connector))


def _by_cell(samples: Sequence[Sample]) -> dict[tuple[str, int, str], list[Sample]]:
    groups: dict[tuple[str, int, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.connector, sample.input_tokens, sample.load].append(sample)
    return groups


def _row(name: str, cell: Cell, answers: list[Answer], samples: list[Sample]) -> Row:
    figures = {metric: metrics.figures(metrics.values(answers, metric)) for metric in metrics.METRICS}
    return Row(
        connector=name,
        input_tokens=cell.shape.input_tokens,
        output_tokens=cell.shape.output_tokens,
        load=str(cell.load),
        rate_per_s=cell.load.per_s if isinstance(cell.load, Rate) else None,
        requests=len(answers),
        errors=sum(1 for answer in answers if answer.error),
        wrong_texts=sum(1 for sample in samples if sample.text is Text.WRONG),
        ttft=figures["ttft"],
        tpot=figures["tpot"],
        itl=figures["itl"],
        e2el=figures["e2el"],
        goodput=0.0,
        ratios={},
        split=_mean_split(samples),
        descriptors=float(np.mean([sample.descriptors for sample in samples])) if samples else 0.0,
    )


def _mean_split(samples: list[Sample]) -> dict[str, float]:
    known = [sample.split for sample in samples if sample.split]
    stages = {stage: None for split in known for stage in split}
    return {stage: round(float(np.mean([split.get(stage, 0.0) for split in known])), 3) for stage in stages}


def _compare(row: Row, own: list[Answer], reference: list[Answer] | None, single: list[Answer] | None) -> None:
    if reference is not None:
        row.ratios = {m: ratio for m in _RATIO_METRICS if (ratio := _ratio(own, reference, m)) is not None}
    if single is not None and row.load == str(Concurrency(1)):
        pairs = _pairs(own, single)
        if pairs and row.connector != Contender.SINGLE.value:
            row.overhead_ms = round(float(np.mean([metrics.ttft_ms(a) - metrics.ttft_ms(b) for a, b in pairs])), 3)


def _pairs(own: list[Answer], other: list[Answer]) -> list[tuple[Answer, Answer]]:
    """Answers to the same prompts, where both succeeded."""
    return [(a, b) for a, b in zip(own, other, strict=False) if a.chunks and b.chunks and not (a.error or b.error)]


def _ratio(own: list[Answer], reference: list[Answer], metric: str) -> Ratio | None:
    pairs = _pairs(own, reference)
    ours = metrics.values([b for _, b in pairs], metric)
    return metrics.paired_ratio(ours, metrics.values([a for a, _ in pairs], metric))
