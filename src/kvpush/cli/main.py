"""The `kvpush` command: its sub-commands, and what an error looks like.

Sub-commands import what they need when they run, so that `kvpush --help` is fast and works without vLLM.
"""

import sys
from typing import Annotated

import typer

import kvpush
from kvpush.cli.bench import bench_app
from kvpush.cli.demo import demo_command
from kvpush.cli.doctor import doctor_command
from kvpush.cli.models_command import models_command
from kvpush.cli.output import errors
from kvpush.cli.router import router_command
from kvpush.cli.up import up_command
from kvpush.core.errors import ConfigError, KVPushError

app = typer.Typer(
    name="kvpush",
    help="Prefill/decode disaggregation for vLLM in which the prefill engine pushes the KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up")(up_command)
app.command("router")(router_command)
app.command("models")(models_command)
app.command("doctor")(doctor_command)
app.command("demo")(demo_command)
app.add_typer(bench_app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvpush {kvpush.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Prefill/decode disaggregation for vLLM in which the prefill engine pushes the KV cache."""


def main() -> None:
    """Run the command; what kvpush refuses is one message and status 2, what fails status 1."""
    try:
        app()
    except ConfigError as error:
        errors.print(f"kvpush: {error}", style="red", markup=False)
        sys.exit(2)
    except KVPushError as error:
        errors.print(f"kvpush: {error}", style="red", markup=False)
        sys.exit(1)
