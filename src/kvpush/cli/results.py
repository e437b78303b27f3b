"""Files that a command writes when it is done; one that cannot be written is refused before it begins."""

from pathlib import Path

import msgspec
import typer

from kvpush.core.errors import ConfigError


def writable(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """The callback of an option that names such a file. Raises `ConfigError`."""
    if path is None:
        return None
    is_new = not path.exists()
    try:
        path.open("ab").close()  # what os.access says does not hold for root, nor for every file system
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise ConfigError(param.opts[0].lstrip("-"), problem, "Name a file in a folder that can be written.") from None
    if is_new:
        path.unlink()
    return path


def write_json(path: Path | None, value: object) -> None:
    """Write `value`, indented, where it is wanted."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
