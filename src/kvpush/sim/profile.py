"""Device profiles: how long a step takes on a device that is not here, and the KV geometry of its model."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvpush.core.errors import ConfigError


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device with one model, as one tensor-parallel rank sees it.

    A step takes `step_us` (weights are read once) + `prefill_us` per prefill token + `context_ns` per token
    of KV that its decoding requests read. `launch_us` is the host's time to launch a step.
    `source` says where the numbers come from and what is scaled.
    """

    name: str
    source: str
    layers: int
    kv_heads: int
    head_dim: int
    prefill_us: float
    step_us: float
    context_ns: float = 0.0
    launch_us: float = 0.0
    dtype: str = "bfloat16"
    vocabulary: int = 4096
    block_size: int = 16
    max_model_len: int = 32768
    max_batched_tokens: int = 8192
    max_seqs: int = 64

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "prefill_us", "step_us", "block_size"):
            if not getattr(self, field) > 0:
                raise ConfigError(
                    f"profile {self.name}.{field}", f"must be greater than 0, got {getattr(self, field)}", "Set it."
                )

    def step_s(self, prefill_tokens: int, context_tokens: int) -> float:
        """Seconds that one step takes on the device."""
        return (self.step_us + self.prefill_us * prefill_tokens) / 1e6 + self.context_ns * context_tokens / 1e9

    @property
    def planes(self) -> int:
        """KV words that the simulated model keeps per token: one per layer and head."""
        return self.layers * self.kv_heads

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers (two bytes per element)."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2


def names() -> list[str]:
    """The profiles that come with kvpush."""
    folder = resources.files("kvpush.sim") / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name_or_path: str) -> Profile:
    """A profile by name, or from a TOML file. Raises `ConfigError` naming the field at fault."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError("device", f"there is no profile file '{path}'", "Give a name or an existing file.")
        return _parse(path.read_bytes(), path.stem)
    if name_or_path not in names():
        raise ConfigError("device", f"unknown profile '{name_or_path}'", f"Use one of {', '.join(names())}, or a file.")
    return _parse((resources.files("kvpush.sim") / "profiles" / f"{name_or_path}.toml").read_bytes(), name_or_path)


def _parse(data: bytes, name: str) -> Profile:
    try:
        fields: dict[str, Any] = tomllib.loads(data.decode())
        return msgspec.convert({"name": name, **fields}, Profile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"profile {name}", str(error), "Compare it with the profiles that come with kvpush."
        ) from None
