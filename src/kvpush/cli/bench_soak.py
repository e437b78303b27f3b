"""`kvpush bench soak`: traffic, clients that leave and engines that are killed, for as long as asked."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpush.cli.results import writable, write_json
from kvpush.core.mode import ModeSetting

if TYPE_CHECKING:
    from rich.table import Table

    from kvpush.bench.soak import SoakReport


def bench_soak_command(
    minutes: Annotated[float, typer.Option(help="How long the traffic lasts.")] = 20.0,
    kill_s: Annotated[float, typer.Option(help="Kill an engine so long after all were up; large: never.")] = 60.0,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    aborts: Annotated[float, typer.Option(help="Share of the clients that leave, 0 to 1.")] = 0.10,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and leavings.")] = 1,
    mode: Annotated[ModeSetting, typer.Option(help="Who moves the bytes.")] = ModeSetting.PUSH,
    first_token: Annotated[
        bool, typer.Option("--first-token", help="Decode engines begin with the prefill engine's token.")
    ] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for logs. [default: a new one in the cache]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the counts here.")] = None,
) -> None:
    """Run mixed traffic between four real engines with a tiny model, kill one in turn, and verify every text.

    Exit status 0 only if no text was wrong, no request stuck, no block leaked, and no engine died but the killed ones.
    """
    from kvpush.bench.soak import FirstToken, SoakOptions, soak
    from kvpush.bench.soak_traffic import Mix
    from kvpush.cli.models import ensure_model
    from kvpush.cli.output import console
    from kvpush.cli.up import new_log_dir

    options = SoakOptions(
        model=str(ensure_model("tiny")),
        logs=(log_dir or new_log_dir()).absolute(),
        minutes=minutes,
        kill_s=kill_s,
        concurrency=concurrency,
        seed=seed,
        mode=mode,
        first_token=FirstToken.PREFILL if first_token else FirstToken.DECODE,
        mix=Mix(aborted=aborts),
    )
    report = soak(options, lambda line: console.print(line, markup=False))
    write_json(json_file, report)
    console.print(_counts(report))
    console.print(f"logs: {options.logs}")
    raise typer.Exit(0 if report.passed else 1)


def _counts(report: "SoakReport") -> "Table":
    from rich.table import Table

    table = Table("what", "count", title=f"{report.minutes:.1f} minutes")
    ends = ("requests", "right", "aborted", "failed", "cut", "wrong", "stuck", "leaked_blocks", "killed")
    for name in (*ends, "recomputed", "continued", "reused_tokens"):
        table.add_row(name.replace("_", " "), f"{getattr(report, name):,}")
    table.add_row("died by themselves", ", ".join(report.died) or "0")
    for name, number in {**report.transfers, **report.events}.items():
        table.add_row(name, f"{number:,}")
    return table
