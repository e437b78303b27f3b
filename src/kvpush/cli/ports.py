"""Finding ports that are free and stay so: outside the range from which the kernel hands out its own."""

import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack

from kvpush.core.errors import ConfigError

_LOWEST, _HIGHEST = 12_000, 32_000  # below Linux' default range of ephemeral ports
_TRIES = 500


def free_ports(count: int, width: int = 1, host: str = "127.0.0.1") -> list[int]:
    """The first ports of `count` free ranges of `width` neighbours that do not overlap.

    An engine binds them a minute later, so they must not be ones that any outgoing connection may take
    meanwhile. Raises `ConfigError` when there are not that many.
    """
    candidates = list(range(_LOWEST, _HIGHEST - width + 1, width))
    random.shuffle(candidates)
    found: list[int] = []
    for base in candidates[:_TRIES]:
        if len(found) == count:
            break
        if can_listen(range(base, base + width), host):
            found.append(base)
    if len(found) < count:
        raise ConfigError(
            "port",
            f"only {len(found)} of {count} ranges of {width} free ports found on {host} in {_LOWEST}-{_HIGHEST}",
            "Stop what listens there.",
        )
    return found


def can_listen(ports: Iterable[int], host: str = "127.0.0.1") -> bool:
    """Whether all of `ports` can be bound now."""
    with ExitStack() as stack:
        return not any(_bind_error(stack, port, host) for port in ports)


def listen_error(port: int, host: str) -> str:
    """Why `port` (0: any) cannot be bound now, "" when it can."""
    with ExitStack() as stack:
        return _bind_error(stack, port, host)


def _bind_error(stack: ExitStack, port: int, host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""
