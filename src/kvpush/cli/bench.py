"""`kvpush bench`: measure, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpush.cli.bench_faults import bench_faults_command
from kvpush.cli.bench_router import bench_router_command
from kvpush.cli.bench_soak import bench_soak_command
from kvpush.cli.results import writable, write_json
from kvpush.core.errors import ConfigError

if TYPE_CHECKING:
    from kvpush.bench.compare import Outcome
    from kvpush.bench.plan import Options

bench_app = typer.Typer(
    name="bench",
    help="Measure connectors side by side, and kvpush's parts one by one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.callback()
def _root() -> None:
    """Measure connectors side by side, and kvpush's parts one by one."""


@bench_app.command("compare")
def compare_command(
    connectors: Annotated[
        str, typer.Option(help="Comma-separated: single, kvpush:push, kvpush:first, kvpush:pull, vllm:push, vllm:pull.")
    ] = "single,kvpush:push,vllm:push,vllm:pull",
    device: Annotated[str, typer.Option(help="What the engines compute on: sim:PROFILE.")] = "sim:ci",
    input: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "512,2048",
    output: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 128,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "",
    rate: Annotated[str, typer.Option(help="Poisson arrivals, as shares of the measured saturation: 0.4,0.8.")] = "",
    requests: Annotated[int, typer.Option(help="Requests per connector, length and load.")] = 40,
    rounds: Annotated[int, typer.Option(help="Turns that each connector gets, in alternation.")] = 2,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and the order of connectors.")] = 1,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check all KV that was transferred, and every text.")
    ] = False,
    fragmented: Annotated[
        bool, typer.Option("--fragmented", help="Fill and free the KV pools first, so that free blocks are scattered.")
    ] = False,
    prefix_share: Annotated[float, typer.Option(help="Part of each prompt that all have in common, 0 to 1.")] = 0.0,
    kv_gib: Annotated[float, typer.Option(help="KV cache of each engine in GiB.")] = 1.0,
    kvpush: Annotated[
        str, typer.Option(help="Settings of kvpush's connector, comma-separated: push=layerwise,reserve_early=0.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="A request that takes longer has failed.")] = 120.0,
    slo_ttft_ms: Annotated[float, typer.Option(help="Goodput counts requests with at most this TTFT.")] = 1000.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="... and at most this time per output token.")] = 30.0,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for logs. [default: a new one in the cache]")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write summary and samples here.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", callback=writable, help="Write a report with plots here.")
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", callback=writable, help="Write a trace of the first round for Perfetto here."),
    ] = None,
) -> None:
    """Run the same workload through several connectors, in alternation, and compare.

    Exit status 0 only if every request ended well and, with --verify, every text was right.

    Example: kvpush bench compare --device sim:llama-3.3-70b-h200-tp4 --rate 0.4,0.8 --html report.html
    """
    from kvpush.bench.compare import compare
    from kvpush.bench.contenders import Setting, parse_contenders
    from kvpush.bench.metrics import Slo
    from kvpush.bench.plan import Options, Pool
    from kvpush.cli.output import console
    from kvpush.cli.up import StopRequested, new_log_dir, stop_signals

    setting = Setting(
        device=device,
        logs=(log_dir or new_log_dir()).absolute(),
        kv_gib=kv_gib,
        verify=verify,
        kvpush=_assignments("kvpush", kvpush),
    )
    options = Options(
        contenders=tuple(parse_contenders(connectors)),
        setting=setting,
        inputs=tuple(int(value) for value in _numbers("input", input)),
        output=output,
        concurrencies=tuple(int(value) for value in _numbers("concurrency", concurrency)),
        rates=tuple(_numbers("rate", rate)),
        requests=requests,
        rounds=rounds,
        seed=seed,
        pool=Pool.FRAGMENTED if fragmented else Pool.CONTIGUOUS,
        prefix_share=prefix_share,
        timeout_s=timeout_s,
        slo=Slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms),
    )
    try:
        with stop_signals():
            outcome = compare(options, console)
    except StopRequested:
        console.print("stopped; nothing is written")
        raise typer.Exit(130) from None
    _write(outcome, options, json_file, html_file, trace_file)
    raise typer.Exit(0 if outcome.succeeded else 1)


def _write(
    outcome: "Outcome", options: "Options", json_file: Path | None, html_file: Path | None, trace_file: Path | None
) -> None:
    from kvpush.bench.tables import print_report
    from kvpush.cli.output import console

    write_json(json_file, outcome.report)
    if html_file:
        from kvpush.bench.html import render

        html_file.write_text(render(outcome.report))
    if trace_file:
        from kvpush.bench.trace import write_trace

        write_trace(outcome.visits, trace_file)
    print_report(outcome.report, console)
    console.print(f"logs: {options.setting.logs}")


def _assignments(name: str, text: str) -> dict[str, str | int | float | bool]:
    """`a=1,b=x`, each value as JSON where it is some, else as text."""
    import msgspec

    values: dict[str, str | int | float | bool] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(name, f"'{part}' is no setting", "Write it as push=layerwise, say.")
        try:
            values[key.strip()] = msgspec.json.decode(value, type=int | float | bool | str)
        except msgspec.DecodeError:
            values[key.strip()] = value.strip()
    return values


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(name, f"'{text}' is no list of numbers", "Write it as 512,2048, say.") from None


@bench_app.command("micro")
def micro_command(
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the figures here.")] = None,
) -> None:
    """Measure the planner, the codec, the endpoint, the transfer thread and NIXL, without engines."""
    from rich.table import Table

    from kvpush.bench.micro import run_micro
    from kvpush.cli.output import console

    report = run_micro()
    write_json(json_file, report)
    table = Table("figure", "value", "unit", "what")
    for measure in report.measures:
        table.add_row(measure.name, f"{measure.value:,.1f}", measure.unit, measure.what)
    console.print(table)


bench_app.command("faults")(bench_faults_command)
bench_app.command("router")(bench_router_command)
bench_app.command("soak")(bench_soak_command)
