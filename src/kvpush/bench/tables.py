"""A comparison's summary on a terminal."""

from rich.console import Console
from rich.table import Table

from kvpush.bench.results import Report, Row

_FILE_WIDTH = 180
"""Columns of a log that is no terminal."""


def print_report(report: Report, console: Console) -> None:
    """Tables of latencies, hand-over split and costs."""
    if report.simulated:
        console.print(f"SIMULATED device {report.device}: forward passes take the time that a profile says")
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    console.print(_latencies(report.summary))
    console.print(_splits(report.summary))
    console.print(_costs(report.summary))
    for failure in report.failures:
        console.print(f"FAILED: {failure.connector} in round {failure.round + 1}: {failure.error}", markup=False)
    for idle in report.idle:
        cores = ", ".join(f"{name} {value:.3f}" for name, value in idle.cores.items())
        console.print(f"idle CPU, cores: {idle.connector}: {cores}")


def _latencies(rows: list[Row]) -> Table:
    table = Table(title="milliseconds; x is the mean TTFT over that of kvpush:push")
    for name in (
        "input",
        "load",
        "connector",
        "TTFT",
        "p50",
        "p99",
        "x",
        "over single",
        "TPOT",
        "p99 ",
        "good/s",
        "bad",
    ):
        table.add_column(name, justify="left" if name in ("load", "connector") else "right")
    last = None
    for row in rows:
        if last is not None and last != (row.input_tokens, row.load):
            table.add_section()
        last = (row.input_tokens, row.load)
        table.add_row(*_latency_cells(row))
    return table


def _latency_cells(row: Row) -> list[str]:
    ratio = row.ratios.get("ttft")
    return [
        str(row.input_tokens),
        row.load if row.rate_per_s is None else f"{row.load} ({row.rate_per_s:.2f}/s)",
        row.connector,
        *(_ms(getattr(row.ttft, name, None)) for name in ("mean", "median", "p99")),
        f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "",
        _ms(row.overhead_ms),
        *(_ms(getattr(row.tpot, name, None)) for name in ("mean", "p99")),
        f"{row.goodput:.2f}",
        str(row.errors + row.wrong_texts),
    ]


def _splits(rows: list[Row]) -> Table:
    stages = list(dict.fromkeys(stage for row in rows for stage in row.split))
    table = Table(title="where the time to first token went, mean milliseconds")
    for name in ("input", "load", "connector", *stages):
        table.add_column(name, justify="left" if name in ("load", "connector") else "right")
    for row in rows:
        values = (_ms(row.split.get(stage)) for stage in stages)
        table.add_row(str(row.input_tokens), row.load, row.connector, *values)
    return table


def _costs(rows: list[Row]) -> Table:
    table = Table(
        title="microseconds of CPU in connector hooks on engine threads (+clock: per request, with the clock's own); "
        "cores of the whole cluster; descriptors"
    )
    names = (
        "input",
        "load",
        "connector",
        "P/request",
        "P/step",
        "+clock",
        "D/request",
        "D/step",
        "+clock ",
        "longest",
        "cores",
        "desc",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("load", "connector") else "right")
    for row in rows:
        if (cost := row.cost) is not None:
            values = (
                cost.prefill_us_per_request,
                cost.prefill_us_per_step,
                cost.prefill_counted_us_per_request,
                cost.decode_us_per_request,
                cost.decode_us_per_step,
                cost.decode_counted_us_per_request,
                cost.longest_hook_us,
                cost.cpu_cores,
                row.descriptors,
            )
            table.add_row(str(row.input_tokens), row.load, row.connector, *(f"{value:.1f}" for value in values))
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
