"""Two network namespaces joined by one cable, which can be cut."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from os import getpid

_numbers = count()


class Cable:
    """Joins the namespaces `names`; the interface of each is in `devices`, with the addresses 10.77.0.1 and 2."""

    def __init__(self) -> None:
        number = f"{getpid()}x{next(_numbers)}"
        self.names = (f"kvpa{number}", f"kvpb{number}")
        # the kernel takes at most 15 characters
        self.devices = (f"a{number}"[:15], f"b{number}"[:15])

    def inside(self, side: int) -> tuple[str, ...]:
        """What goes before a command to run it in one of the namespaces."""
        return ("ip", "netns", "exec", self.names[side])

    def address(self, side: int) -> str:
        """Of one of the ends."""
        return f"10.77.0.{side + 1}"

    def spoil(self, *discipline: str) -> bool:
        """Let the cable delay or lose what both ends send, in the words of `tc qdisc`. False when the kernel cannot."""
        for name, device in zip(self.names, self.devices, strict=True):
            command = ("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *discipline)
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return False
        return True

    def cut(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", self.devices[1], "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", self.devices[1], "up")

    def lay(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self.names[0], "link", "add", self.devices[0], "type", "veth", "peer", self.devices[1])
        _ip("-n", self.names[0], "link", "set", self.devices[1], "netns", self.names[1])
        for side, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
            _ip("-n", name, "addr", "add", f"10.77.0.{side + 1}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


@contextmanager
def cable() -> Iterator[Cable | None]:
    """A cable, or None where this kernel or user cannot have one."""
    laid = Cable()
    try:
        try:
            laid.lay()
        except (OSError, subprocess.CalledProcessError):
            yield None
        else:
            yield laid
    finally:
        if shutil.which("ip"):
            laid.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
