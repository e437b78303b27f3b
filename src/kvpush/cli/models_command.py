"""`kvpush models`: list the models that can be made here, and make them."""

from pathlib import Path
from typing import Annotated

import typer


def models_command(
    names: Annotated[list[str] | None, typer.Argument(help="Models to make; none lists them.")] = None,
) -> None:
    """Make models for tests and the demo, without a hub, into the cache folder (KVPUSH_CACHE).

    Without a name: list them and where they are.
    """
    from kvpush.cli.output import console

    if not names:
        _list()
        return
    for name in names:
        folder = make_model(name)
        console.print(f"{name:14} {folder}", markup=False)


def _list() -> None:
    from kvpush.cli.models import CATALOG
    from kvpush.cli.output import console

    for recipe in CATALOG.values():
        state = str(recipe.folder) if recipe.folder.is_dir() else "not made yet"
        console.print(f"{recipe.name:14} {recipe.about}\n{'':14} {state}", markup=False)


def make_model(name: str) -> Path:
    """The folder for what a user gave as a model, made first when it has to be, with progress on the console."""
    from kvpush.cli.models import model_path
    from kvpush.cli.output import errors

    with errors.status(f"{name} ...") as status:
        return model_path(name, lambda step: status.update(f"{name}: {step}"))
