"""Which prompts this engine has computed although another was to send them, as the API server knows it.

Reported by the scheduler's side with the statistics of a step (metrics.py), asked for when an answer begins
(path_header.py). Owned by the API server's event loop, as both happen there.
"""

from collections.abc import Iterable, Sequence
from typing import Final

MOST_IDS = 4096
"""The newest are remembered, and travel with one report: more than one engine has requests waiting. Those of clients
that have left are never asked for."""


def newest(ids: Sequence[str]) -> list[str]:
    """As many as may travel."""
    return list(ids[-MOST_IDS:])


class Recomputed:
    """Transfer ids, each until it is asked for."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def note(self, ids: Iterable[str]) -> None:
        """The prompts of these transfers are computed here, or one of several that share an id is."""
        for name in ids:
            self._ids.pop(name, None)
            self._ids[name] = None
            if len(self._ids) > MOST_IDS:
                del self._ids[next(iter(self._ids))]

    def take(self, name: str) -> bool:
        """Whether this is one of them; asked once."""
        is_one = name in self._ids
        self._ids.pop(name, None)
        return is_one

    def __len__(self) -> int:
        return len(self._ids)


RECOMPUTED: Final = Recomputed()
"""The one of this process: vLLM makes both ends of it by name, and gives neither to the other."""
