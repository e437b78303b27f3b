"""Engines named in a file that is read again when it changes: one JSON object,

    {"prefill": ["http://p0:8100,kv=p0:5600"], "decode": ["http://d0:8200"]}

with engines written as on the command line. Engines that are no longer named are removed; their legs go on. A file that
cannot be read leaves everything as it is.
"""

import asyncio
import logging
from pathlib import Path

import msgspec

from kvpush.core.errors import ConfigError
from kvpush.router.config import EngineRole, EngineSpec, parse_engine
from kvpush.router.fleet import Fleet

logger = logging.getLogger(__name__)

_NEVER_READ = (-1, -1)


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


def read_engines(path: Path) -> dict[EngineSpec, EngineRole]:
    """The engines named in the file. Raises `ConfigError`."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=EngineFile)
    except OSError as error:
        raise ConfigError("engines_file", f"{path} cannot be read: {error.strerror}", "Name a readable file.") from None
    except msgspec.DecodeError as error:
        remedy = 'Write {"prefill": ["http://..."], "decode": ["http://..."]}.'
        raise ConfigError("engines_file", f"{path}: {error}", remedy) from None
    named = {parse_engine(text): EngineRole.PREFILL for text in content.prefill}
    return named | {parse_engine(text): EngineRole.DECODE for text in content.decode}


class EngineFileWatch:
    """Keeps the fleet as the file says. Engines from elsewhere are left alone."""

    def __init__(self, path: Path, fleet: Fleet, every_s: float) -> None:
        self._path = path
        self._fleet = fleet
        self._every_s = every_s
        self._stamp: tuple[int, int] | None = _NEVER_READ  # None: there is no such file
        self._named: dict[EngineSpec, EngineRole] = {}

    async def run(self) -> None:
        """Look at the file until cancelled."""
        while True:
            try:
                self.look()
            except ConfigError as error:
                logger.error("engines stay as they are: %s", error)
            await asyncio.sleep(self._every_s)

    def look(self) -> None:
        """Read the file if it has changed, and apply it. Raises `ConfigError`, once for each content."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        named = read_engines(self._path)
        for spec in self._named.keys() - named.keys():
            self._fleet.remove(spec.url)
        for spec in named.keys() - self._named.keys():
            self._fleet.add(spec, named[spec])
        self._named = named

    def _read_stamp(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size)
