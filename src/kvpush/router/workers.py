"""Several router processes on one port: the kernel shares connections among them (SO_REUSEPORT).

Each worker knows exactly what it has sent itself, and what the others have only from the engines' metrics. Turns of
conversations they tell each other (siblings.py); for `/metrics`, `/health` and the admin routes the one that a client
has got asks the others (others.py). When one worker dies all are stopped: a supervisor restarts the whole.
"""

import logging
import multiprocessing
import signal
import socket
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import msgspec

from kvpush.core.errors import ConfigError, KVPushError
from kvpush.router.config import RouterConfig
from kvpush.router.enginefile import read_engines
from kvpush.router.place import meeting_places

logger = logging.getLogger(__name__)


def run_workers(config: RouterConfig, log_level: int) -> None:
    """Serve with `config.workers` processes until SIGINT or SIGTERM, or until one of them dies.

    Raises `ConfigError` when the port cannot be shared or the engines file not be read, `KVPushError` when a worker
    died.
    """
    if config.engines_file:
        read_engines(Path(config.engines_file))
    with reserve(config) as reserved, meeting_places(config.workers) as places:
        port = reserved.getsockname()[1]
        configs = [msgspec.structs.replace(config, port=port, place=place) for place in places]
        spawn = multiprocessing.get_context("spawn")
        workers: list[BaseProcess] = [
            spawn.Process(target=_work, args=(one, log_level), name=f"router-{number}")
            for number, one in enumerate(configs)
        ]
        _supervise(workers)


def reserve(config: RouterConfig) -> socket.socket:
    """Bind the port without listening, so that it is found free, or chosen, once for all workers."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((config.host, config.port))
    except OSError as error:
        reserved.close()
        problem = f"{config.host}:{config.port} cannot be shared by workers: {error.strerror or error}"
        raise ConfigError("host/port", problem, "Choose a free port of this machine.") from None
    return reserved


def _work(config: RouterConfig, log_level: int) -> None:
    from kvpush.router.app import run

    form = "%(asctime)s %(levelname)s %(processName)s %(name)s: %(message)s"
    logging.basicConfig(level=log_level, format=form)
    run(config)


class _Stopped(Exception):
    """A signal asked for the end."""


def _supervise(workers: list[BaseProcess]) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for worker in workers:
            worker.start()
        ended = wait([worker.sentinel for worker in workers])
        dead = next(worker for worker in workers if worker.sentinel in ended)
        dead.join()  # its sentinel may be seen a moment before its status
        raise KVPushError(f"{dead.name} ended with status {dead.exitcode}; the other workers are stopped")
    except _Stopped:
        logger.info("stopping %d workers", len(workers))
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            worker.join()
        for number, handler in before.items():
            signal.signal(number, handler)
