"""`kvpush bench router`: what a router adds to the latency of an engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpush.cli.results import writable, write_json
from kvpush.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kvpush.bench.router import RouterRow


def bench_router_command(
    requests: Annotated[int, typer.Option(help="Requests per target, concurrency and round.")] = 400,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "1,64,200",
    rounds: Annotated[int, typer.Option(help="Turns that each target gets, in alternation.")] = 9,
    service_ms: Annotated[float, typer.Option(help="What the stub engines take for the first token.")] = 10.0,
    chunks: Annotated[int, typer.Option(help="Tokens of an answer, each an event of its own.")] = 32,
    gap_ms: Annotated[float, typer.Option(help="Time between tokens; 0 sends all at once.")] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the figures here.")] = None,
) -> None:
    """Measure stub engines of fixed speed: alone, through kvpush's router, and through vllm-router if installed.

    Load, stubs and routers share this machine. No GPU and no vLLM are needed.

    Example, for the time between tokens: kvpush bench router --concurrency 200 --gap-ms 50
    """
    from kvpush.bench.router import RouterBench, bench_router
    from kvpush.cli.output import console

    try:
        concurrencies = tuple(int(part) for part in concurrency.split(","))
    except ValueError:
        raise ConfigError("concurrency", f"'{concurrency}' is no list of numbers", "Write it as 1,64,200.") from None
    options = RouterBench(
        requests=requests,
        concurrencies=concurrencies,
        rounds=rounds,
        service_ms=service_ms,
        chunks=chunks,
        gap_ms=gap_ms,
    )
    rows = bench_router(options, lambda line: console.print(line, markup=False))
    write_json(json_file, rows)
    console.print(_table(rows))


def _table(rows: "list[RouterRow]") -> "Table":
    from rich.table import Table

    headings = ("in flight", "target", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "requests/s", "per core", "failed")
    table = Table(*headings, title="medians over the rounds; per core: requests/s of the router's own CPU time")
    for row in rows:
        times = (row.ttft_p50_ms, row.ttft_p99_ms, row.itl_p50_ms, row.itl_p99_ms)
        per_core = f"{row.per_core:,.0f}" if row.per_core else ""
        cells = (*(f"{value:.2f}" for value in times), f"{row.requests_per_s:,.0f}", per_core, str(row.failed))
        table.add_row(str(row.concurrency), row.target, *cells)
    return table
