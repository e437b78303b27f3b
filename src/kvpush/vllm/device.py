"""Events of the device that the model runs on: how the host learns, without waiting, how far it has come."""

from collections.abc import Callable

import torch

from kvpush.runtime.gate import DeviceEvent

Recorder = Callable[[], DeviceEvent | None]
"""Records an event after all work launched so far on the calling thread's stream. None: it is all done."""

_simulated: Recorder | None = None


def simulate(recorder: Recorder) -> None:
    """Take events from `recorder`, for the rest of this process's life: its device is not real."""
    global _simulated
    _simulated = recorder


def recorder_for(device: torch.device) -> Recorder:
    """How to record events on the device that holds the caches."""
    if _simulated is not None:
        return _simulated
    return _all_done if device.type == "cpu" else _Accelerator(device.type).record


class _Accelerator:
    """Whoever waits for its events sleeps (`blocking`); a spinning wait would cost a core."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def record(self) -> DeviceEvent:
        event = torch.Event(self._kind, blocking=True)
        event.record()
        fired: DeviceEvent = event
        return fired


def _all_done() -> None:
    """Kernels on a CPU have run when their call returns."""
    return None
