"""The models that kvpush can make, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpush.cli.models import smollm2, tiny
from kvpush.cli.models.cache import cache_dir, ensure_folder
from kvpush.core.errors import ConfigError

Progress = Callable[[str], None]
"""Called with one short line for each step of making a model."""


@dataclass(frozen=True)
class Recipe:
    """How one model is made. A new `version` goes to a new folder, so that old ones are never mistaken for it."""

    name: str
    version: int
    about: str
    build: Callable[[Path, Progress], None]

    @property
    def folder(self) -> Path:
        """Where the model is, or will be."""
        return cache_dir() / "models" / f"{self.name}-v{self.version}"


CATALOG = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny", tiny.VERSION, "random Llama, 8 layers, 8192 positions, byte tokens: for tests", tiny.build),
        Recipe("smollm2-135m", smollm2.VERSION, "SmolLM2-135M-Instruct in float32: answers questions", smollm2.build),
    )
}


def ensure_model(name: str, progress: Progress | None = None) -> Path:
    """The folder of the model `name`, made first if it is not there (seconds).

    Raises `ConfigError` for a name that is not in the catalog, or when a package needed to make it is missing.
    """
    recipe = CATALOG.get(name)
    if recipe is None:
        raise ConfigError("model", f"'{name}' is not known", f"Use one of {', '.join(CATALOG)}.")
    say = progress or (lambda _: None)
    ensure_folder(recipe.folder, lambda scratch: recipe.build(scratch, say))
    return recipe.folder


def model_path(name_or_path: str, progress: Progress | None = None) -> Path:
    """The folder for what a user gave as `--model`: a name in the catalog, or a checkpoint's folder.

    Raises `ConfigError` when it is neither.
    """
    if name_or_path in CATALOG:
        return ensure_model(name_or_path, progress)
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    raise ConfigError(
        "model",
        f"'{name_or_path}' is neither a known model nor a folder with a config.json",
        f"Use one of {', '.join(CATALOG)}, or the folder of a checkpoint.",
    )
