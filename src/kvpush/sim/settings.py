"""How the simulated worker is told what to do: environment variables, set by launch.py and read here."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvpush.sim.profile import Profile, load

_PROFILE = "KVPUSH_SIM_PROFILE"
_VERIFY = "KVPUSH_SIM_VERIFY"
_LOG = "KVPUSH_SIM_LOG"


ALONE = "alone"
"""The name of an engine without a connector."""


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`verify`: check all loaded KV. `log`: folder for step logs, "" for none."""

    profile: str
    verify: bool = False
    log: str = ""

    def to_env(self) -> dict[str, str]:
        """The environment of an engine that is to use these settings."""
        return {_PROFILE: self.profile, _VERIFY: "1" if self.verify else "0", _LOG: self.log}

    def load_profile(self) -> Profile:
        """Raises `ConfigError` when there is no such profile."""
        return load(self.profile)

    def steps_file(self, engine: str) -> Path | None:
        """Where the engine's steps are logged; None when they are not."""
        return steps_file(Path(self.log), engine) if self.log else None


def steps_file(folder: Path, engine: str) -> Path:
    """The step log of one engine."""
    return folder / f"steps-{engine}.jsonl"


def is_simulated(environ: Mapping[str, str]) -> bool:
    """Whether an engine with this environment runs on a simulated device."""
    return _PROFILE in environ


def from_env() -> SimSettings:
    """The settings of this process."""
    return SimSettings(
        profile=os.environ.get(_PROFILE, "ci"),
        verify=os.environ.get(_VERIFY, "0") == "1",
        log=os.environ.get(_LOG, ""),
    )
