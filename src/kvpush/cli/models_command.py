"""`kvpush models`: list the models that can be made here, and make them."""

from typing import Annotated

import typer


def models_command(
    names: Annotated[list[str] | None, typer.Argument(help="Models to make; none lists them.")] = None,
) -> None:
    """Make models for tests and the demo, without a hub, into the cache folder (KVPUSH_CACHE).

    Without a name: list them and where they are.
    """
    if not names:
        _list()
        return
    for name in names:
        _make(name)


def _list() -> None:
    from kvpush.cli.models import CATALOG
    from kvpush.cli.output import console

    for recipe in CATALOG.values():
        state = str(recipe.folder) if recipe.folder.is_dir() else "not made yet"
        console.print(f"{recipe.name:14} {recipe.about}\n{'':14} {state}", markup=False)


def _make(name: str) -> None:
    from kvpush.cli.models import ensure_model
    from kvpush.cli.output import console, errors

    with errors.status(f"{name} ...") as status:
        folder = ensure_model(name, lambda step: status.update(f"{name}: {step}"))
    console.print(f"{name:14} {folder}", markup=False)
