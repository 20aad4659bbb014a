"""Gemma 4's per-layer embeddings: each layer adds its own embedding of each token.

The table is wide (layers * E numbers per token), but it is only looked up and never multiplied, so it
costs memory and hardly any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernels.device import mx
from kernels.packed import Matrix
from models.layers import Norm
from models.ops import geglu


class LayerInputs(NamedTuple):
    """norm(projection(x)) + factor * table[id]: E numbers per layer, where x is the token's embedding"""

    table: Matrix  # ids -> layers * E
    projection: Matrix  # D -> layers * E
    norm: Norm  # over E numbers
    factor: float

    def __call__(self, ids: mx.array, x: mx.array, logits_at: Sequence[int]) -> list[mx.array]:
        """Return each layer's input, (N, E). That of the last layer has only the `logits_at` rows."""
        E = self.norm.weight.size
        of_ids = self.factor * self.table.embed(ids).reshape(len(ids), -1, E)  # (N, layers, E)
        both = self.norm(self.projection(x).reshape(of_ids.shape)) + of_ids
        *before, last = (part[:, 0] for part in mx.split(both, both.shape[1], axis=1))
        return [*before, last[mx.array(list(logits_at), mx.int32)]]


class AddInput(NamedTuple):
    """scalar * (x + norm(projection(gelu(gate(x)) * input)))"""

    layer: int
    gate: Matrix  # D -> E
    projection: Matrix  # E -> D
    norm: Norm
    scalar: mx.array  # (1,)

    def __call__(self, x: mx.array, inputs: Sequence[mx.array]) -> mx.array:  # (N, D) -> the same
        gated = geglu(mx.concatenate([self.gate(x), inputs[self.layer]], axis=1))  # (N, E)
        return self.scalar * (x + self.norm(self.projection(gated)))


class Scaled(NamedTuple):
    """scalar * x, in models without per-layer embeddings"""

    scalar: mx.array  # (1,)

    def __call__(self, x: mx.array, inputs: Sequence[mx.array]) -> mx.array:
        return self.scalar * x
