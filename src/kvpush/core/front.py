"""How far KV has come: positions on one side, layers on the other. Pure values.

A prompt becomes final chunk by chunk, and within a chunk layer by layer. So at any time the first layers of a model
are one chunk ahead of the others, and what is final, or posted, has the shape of one stair.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from kvpush.core.errors import LocalProtocolError
from kvpush.core.layout import Layers, Span


class Patch(NamedTuple):
    """Some tokens in some layers."""

    span: Span
    layers: Layers

    def split(self, pieces: int) -> "Iterator[Patch]":
        """The same in `pieces` patches of about as many layers each; at most one per layer."""
        first, last = self.layers
        pieces = min(pieces, last - first)
        cuts = [first + (last - first) * cut // pieces for cut in range(pieces + 1)]
        for layers in pairwise(cuts):
            yield Patch(self.span, Layers(*layers))


class Front(NamedTuple):
    """The tokens [0, `tokens`) in all layers, and [0, `ahead`) in the first `layers` of them."""

    tokens: int = 0
    ahead: int = 0
    layers: int = 0

    @classmethod
    def flat(cls, tokens: int) -> "Front":
        """The same tokens in all layers."""
        return cls(tokens, tokens, 0)

    def at(self, layer: int) -> int:
        """How many tokens there are in one layer."""
        return self.ahead if layer < self.layers else self.tokens

    def grown(self, tokens: int, layers: int | None) -> "Front":
        """With `tokens` in the first `layers` layers, or in all. Raises `LocalProtocolError` when there were more."""
        if tokens < self.tokens:
            raise LocalProtocolError(f"final tokens went from {self.tokens} to {tokens}")
        return Front.flat(tokens) if layers is None else Front(self.tokens, tokens, layers)

    def each(self, change: Callable[[int], int]) -> "Front":
        """With both numbers of tokens changed, by a function that keeps their order."""
        return Front(change(self.tokens), change(self.ahead), self.layers)

    def patches_to(self, later: "Front", layers: int) -> Iterator[Patch]:
        """What `later` has more than this, in a model of `layers` layers."""
        edges = sorted({0, min(self.layers, layers), min(later.layers, layers), layers})
        for first, last in pairwise(edges):
            span = Span(self.at(first), later.at(first))
            if span.tokens > 0:
                yield Patch(span, Layers(first, last))


NOWHERE = Front()
"""No tokens in any layer."""
