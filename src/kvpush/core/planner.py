"""From block tables to transport descriptors. Pure: frozen inputs to a frozen plan."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpush.core.layout import Blocks, Layout, Span


@dataclass(frozen=True, eq=False)
class Plan:
    """Descriptors of one operation: copy `nbytes[i]` bytes from `local[i]` to `remote[i]`.

    All three are int64 arrays of shape (descriptors,). No two descriptors overlap, and no two neighbours
    could be one.
    """

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    @property
    def descriptors(self) -> int:
        """How many descriptors the plan has."""
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """How many bytes the plan moves."""
        return int(self.nbytes.sum())


def plan(
    span: Span,
    local: Layout,
    local_blocks: Blocks,
    local_start: int,
    remote: Layout,
    remote_blocks: Blocks,
    remote_start: int,
) -> Plan:
    """Descriptors that copy tokens `span` from `local_blocks` to `remote_blocks`.

    `local_start`/`remote_start` are the token positions for which each side's block list begins (the first
    id of each group holds that token). Raises `ValueError` when a list does not cover the span.
    """
    raise NotImplementedError
