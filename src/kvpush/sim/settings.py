"""How the simulated worker is told what to do: environment variables, set by launch.py and read here."""

import os
from pathlib import Path

import msgspec

from kvpush.sim.profile import Profile, load

_PROFILE = "KVPUSH_SIM_PROFILE"
_VERIFY = "KVPUSH_SIM_VERIFY"
_LOG = "KVPUSH_SIM_LOG"


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`verify`: check all loaded KV. `log`: folder for step logs and hook times, one file per process."""

    profile: str
    verify: bool = False
    log: str = ""

    def to_env(self) -> dict[str, str]:
        """The environment of an engine that is to use these settings."""
        return {_PROFILE: self.profile, _VERIFY: "1" if self.verify else "0", _LOG: self.log}

    def load_profile(self) -> Profile:
        """Raises `ConfigError` when there is no such profile."""
        return load(self.profile)

    def log_file(self, kind: str) -> Path | None:
        """This process's file for `kind`; None when nothing is to be logged."""
        return Path(self.log) / f"{kind}-{os.getpid()}.jsonl" if self.log else None


def from_env() -> SimSettings:
    """The settings of this process."""
    return SimSettings(
        profile=os.environ.get(_PROFILE, "ci"),
        verify=os.environ.get(_VERIFY, "0") == "1",
        log=os.environ.get(_LOG, ""),
    )
