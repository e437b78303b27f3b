"""What the running step makes final, handed to the transfer thread as the device gets there.

Owned by vLLM's worker thread, whose hooks come in this order: `begin`, then `layer_launched` for each attention layer
as its kernels are launched (or for none, where the backend or a captured graph does not call the hook), then
`launched`.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from kvpush.core.commands import Final
from kvpush.core.layout import Layout
from kvpush.runtime.gate import Gate
from kvpush.vllm.device import Recorder
from kvpush.vllm.settings import Push

MOST_PARTS = 8
PART_BYTES = 2 << 20
"""A write has fixed costs (planning, a wake-up on either side, a notice), some 0.5 ms of two threads here. What takes
not much longer than that is not worth being sent on its own."""


@dataclass(frozen=True)
class StepFinals:
    """What a step makes final, and how many tokens of that it computes."""

    finals: tuple[Final, ...] = ()
    tokens: int = 0


NO_FINALS = StepFinals()
_NO_CUTS: frozenset[int] = frozenset()


class StepPush:
    """Waits for no event itself: each goes to the gate with the commands that it makes true."""

    def __init__(self, push: Push, layout: Layout, gate: Gate, record: Recorder) -> None:
        self._most_parts = MOST_PARTS if push is Push.LAYERWISE else 1
        self._layers = layout.layers
        self._token_bytes = layout.token_bytes
        self._gate = gate
        self._record = record
        self._step = NO_FINALS
        self._cuts = _NO_CUTS
        self._next_layer = 0

    def begin(self, step: StepFinals) -> bool:
        """A step is about to be launched. Whether `layer_launched` has anything to do in it."""
        self._step, self._next_layer = step, 0
        self._cuts = self._choose_cuts(step.tokens * self._token_bytes) if step.finals else _NO_CUTS
        return bool(self._cuts)

    def _choose_cuts(self, nbytes: int) -> frozenset[int]:
        """After how many layers to hand over what is there; the rest follows when the step is launched."""
        parts = min(self._most_parts, nbytes // PART_BYTES, len(self._layers))
        return frozenset(len(self._layers) * part // parts for part in range(1, parts))

    def layer_launched(self, name: str) -> None:
        """An attention layer has been launched. Layers in another order than the layout's are left to the end."""
        if not self._cuts or name != self._layers[self._next_layer]:
            return
        self._next_layer += 1
        if self._next_layer in self._cuts:
            finals = [replace(final, last=False, layers=self._next_layer) for final in self._step.finals]
            self._gate.submit_after(self._record(), finals)
        if self._next_layer == len(self._layers):
            self._cuts = _NO_CUTS

    def launched(self) -> None:
        """The whole forward pass has been launched."""
        step, self._step, self._cuts = self._step, NO_FINALS, _NO_CUTS
        if step.finals:
            self._gate.submit_after(self._record(), step.finals)
