"""`kvpush bench faults`: what becomes of a request when anything goes wrong at any moment of its transfer."""

import logging
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from kvpush.cli.results import writable, write_json
from kvpush.core.errors import ConfigError
from kvpush.core.events import Purpose
from kvpush.core.mode import Mode

_WIDTH = 160
"""Columns of a log that is no terminal."""


def bench_faults_command(
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind of fault; may be repeated.")] = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="Only this mode; may be repeated. [default: both]")] = None,
    purpose: Annotated[
        list[Purpose] | None,
        typer.Option(
            help="Only prompts on their way to be decoded, or earlier turns on their way back. [default: both]"
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="Write every cell here.")] = None,
) -> None:
    """Try every fault at every moment of a transfer, under both failure policies, in push and in pull: of prompts, and
    of earlier turns of conversations, which the decode engine keeps and the prefill engine goes on from.

    Real are the endpoints, the transfer threads' loops, the faulty transport and the bytes; the clock, the control
    links and the engines' schedulers are simulated. No GPU, no vLLM and no NIXL are needed. Exit status 1 when a
    request did not end, blocks were leaked, or bytes were wrong.
    """
    from rich.progress import track

    from kvpush.bench.faults.kinds import KINDS
    from kvpush.bench.faults.matrix import run_matrix, sums, table
    from kvpush.cli.output import console

    kinds, modes, purposes = tuple(kind or KINDS), tuple(mode or Mode), tuple(purpose or Purpose)
    if unknown := [each for each in kinds if each not in KINDS]:
        raise ConfigError("kind", f"'{unknown[0]}' is no kind of fault", f"Use one of: {', '.join(KINDS)}.")
    logging.getLogger("kvpush").setLevel(logging.CRITICAL)  # thousands of failures are the purpose
    cells = [
        cell
        for each in track(kinds, "faults", console=console, transient=True)
        for cell in run_matrix([each], modes, purposes)
    ]
    write_json(json_file, cells)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    for each_purpose, each_mode in product(purposes, modes):
        console.print(table(cells, each_mode, each_purpose))
    result = sums(cells)
    console.print(str(result))
    if not result.is_good:
        raise typer.Exit(1)
