"""The gated delta net that Qwen 3.5 uses instead of attention in three out of four layers.

A head keeps one matrix S, (Dk, Dv), instead of keys and values, and each token updates it. With our own
product on a CPU, one operation computes the updates (`kernels/delta_net.c`). Otherwise, and with
`--attention plain`, the formula below runs token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernels.delta_net import TAPS, Heads, Places, States
from kernels.device import mx
from kernels.packed import Matrix
from models.layers import Model, Norm, SideBySide
from models.ops import swiglu

if TYPE_CHECKING:
    from kv import Window


class DeltaNet(NamedTuple):
    """The gated delta rule. For each token, with normalized query q and key k:

        S <- g S + k d^T,  d = rate (v - g S^T k)        norm(S^T q) silu(z)

    q, k and v are silu of a convolution over four tokens. One projection yields the inputs of the
    convolution and the numbers from which g and rate are computed.
    """

    index: int  # its index among the layers with states
    heads: Heads
    # D -> inputs of the convolution, and two numbers per value head
    project: Matrix | SideBySide
    weights: mx.array  # flat: taps (TAPS, inputs), then A_log and dt_bias of each value head
    z: Matrix | SideBySide  # D -> Hv * Dv
    norm: Norm  # applied to each head's output
    is_formula: bool
    # (Hv,): the order of value heads in z and in the output projection, if different
    order: mx.array | None = None

    def __call__(
        self, x: mx.array, windows: Sequence[Window]
    ) -> mx.array:  # (N, D) -> (N, Hv * Dv)
        states = windows[0].slab.states[self.index]
        if self.is_formula:
            y = run_formula(states, self.project(x).astype(mx.float32), windows)
        else:
            moves = [window.moves for window in windows]
            moves = moves[0] if len(moves) == 1 else mx.concatenate(moves)
            y = states.change(self.project(x), moves)
        y = self.norm(y.reshape(-1, self.heads.Hv, self.heads.Dv))
        if self.order is not None:
            y = y[:, self.order]
        y = y.flatten(1).astype(x.dtype)
        return swiglu(mx.concatenate([self.z(x), y], axis=1))


def states_of(model: Model, places: Places) -> list[States]:
    """Allocate the states of each layer with a delta net."""
    layers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, DeltaNet)]
    return [States(places, layer.heads, layer.weights) for layer in layers]


# --- the formula --------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """The queries, keys, values, gates and rates of consecutive tokens, for each value head."""

    q: mx.array  # (L, Hv, 1, Dk)
    k: mx.array  # (L, Hv, Dk, 1)
    v: mx.array  # (L, Hv, 1, Dv)
    g: mx.array  # (L, Hv, 1, 1)
    rate: mx.array  # (L, Hv, 1, 1)


class StateUpdate(NamedTuple):
    """A token's update of the state: S <- g S + k d^T"""

    k: mx.array  # (Hv, Dk, 1)
    d: mx.array  # (Hv, 1, Dv)
    g: mx.array  # (Hv, 1, 1)

    def to(self, S: mx.array) -> mx.array:
        return self.g * S + self.k * self.d


def run_formula(states: States, x: mx.array, windows: Sequence[Window]) -> mx.array:
    """Compute each token's output, and write the new states.

    (N, inputs + 2 Hv) -> (N, Hv * Dv)
    """
    results = []
    for move, row, own in sequences(x, windows):
        source, base, target, keep = move
        place = StateArrays(states, source) if source >= 0 else None
        S = mx.zeros((states.heads.Hv, states.heads.Dk, states.heads.Dv))
        if place:
            S = place.S
            for at in range(base, row):
                S = place.change(at).to(S)
        inputs, rest = mx.split(own, [states.heads.inputs], axis=1)
        before = place.inputs(row) if place else mx.zeros((TAPS - 1, inputs.shape[1]))
        inputs = mx.concatenate([before, inputs])  # (TAPS - 1 + L, inputs)
        tokens = prepared(states, inputs, rest)
        kept, log = S, []
        for i, (q, k, v, g, rate) in enumerate(zip(*tokens, strict=True)):
            if row + i == keep:
                kept = S
            d = rate * (v - g * (k.swapaxes(-1, -2) @ S))  # (Hv, 1, Dv)
            change = StateUpdate(k, d, g)
            S = change.to(S)
            results.append((q @ S).flatten())
            log.append(change)
        since = keep - row
        StateArrays(states, target).write(kept, inputs[since:], log[since:], keep)
    return mx.stack(results)


def sequences(
    x: mx.array, windows: Sequence[Window]
) -> Iterator[tuple[Sequence[int], int, mx.array]]:
    """Yield each sequence's state move, its first row, and its part of x."""
    begin = 0
    for window in windows:
        for move, row in zip(window.state_moves, window.starts, strict=True):
            yield move, row, x[begin : begin + window.L]
            begin += window.L


def prepared(states: States, inputs: mx.array, rest: mx.array) -> Tokens:
    """Return the queries, keys, values, gates and rates of L tokens.

    `inputs`: (TAPS - 1 + L, inputs)
    `rest`: (L, 2 Hv)
    """
    Hk, Hv, Dk, Dv = states.heads
    L = len(rest)
    taps, A, dt = mx.split(states.weights, [TAPS * states.heads.inputs, -Hv])
    mixed = sum(inputs[tap : tap + L] * each for tap, each in enumerate(taps.reshape(TAPS, -1)))
    q, k, v = mx.split(mixed * mx.sigmoid(mixed), [Hk * Dk, 2 * Hk * Dk], axis=1)
    q, k = (mx.repeat(normalized(each.reshape(L, Hk, Dk)), Hv // Hk, axis=1) for each in (q, k))
    a, b = mx.split(rest, 2, axis=1)
    softplus = mx.logaddexp(a + dt, 0)
    g = mx.exp(-mx.exp(A) * softplus)
    return Tokens(
        q=q[:, :, None] * Dk**-0.5,
        k=k[..., None],
        v=v.reshape(L, Hv, 1, Dv),
        g=g[..., None, None],
        rate=mx.sigmoid(b)[..., None, None],
    )


def normalized(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


class StateArrays:
    """One place in a layer's states, in the memory layout of `delta_net.c`."""

    def __init__(self, states: States, place: int):
        self.states = states
        self.begin, self.log = states.places.at(states.heads, place)
        Hk, Hv, Dk, Dv = states.heads
        shapes = [(Hv, Dk, Dv), (self.log + TAPS - 1, states.heads.inputs)]
        self.shapes = [*shapes, (self.log, Hk, Dk), (self.log, Hv, Dv), (self.log, Hv)]

    def part(self, index: int) -> slice:
        """Return the part of memory that holds S (0), or the ring of inputs (1), keys (2), d (3) or
        gates (4)."""
        sizes = [math.prod(shape) for shape in self.shapes]
        first = self.begin + sum(sizes[:index])
        return slice(first, first + sizes[index])

    def array(self, index: int) -> mx.array:
        return self.states.memory[self.part(index)].reshape(self.shapes[index])

    @property
    def S(self) -> mx.array:
        return self.array(0)

    def inputs(self, row: int) -> mx.array:  # (TAPS - 1, inputs)
        """Return the inputs of the TAPS - 1 tokens before this row; zeros before the first token."""
        rows = range(row - TAPS + 1, row)
        ring = self.array(1)
        return mx.stack(
            [ring[at % len(ring)] if at >= 0 else mx.zeros(ring.shape[1]) for at in rows]
        )

    def change(self, row: int) -> StateUpdate:
        _, keys, d, gates = (self.array(index)[row % self.log] for index in range(1, 5))
        heads = self.states.heads
        keys = mx.repeat(keys, heads.Hv // heads.Hk, axis=0)
        return StateUpdate(keys[..., None], d[:, None], gates[:, None, None])

    def write(self, S: mx.array, inputs: mx.array, log: Sequence[StateUpdate], base: int) -> None:
        """Write the state before row `base`, and the log of the tokens from there on.

        `inputs`: those of the TAPS - 1 tokens before `base`, then those of the tokens in the log.
        """
        group = self.states.heads.Hv // self.states.heads.Hk
        columns = [[each.k[::group, :, 0] for each in log], [each.d[:, 0] for each in log]]
        columns.append([each.g[:, 0, 0] for each in log])
        self.states.memory[self.part(0)] = S.flatten()
        rings = [(inputs, base - TAPS + 1), *((mx.stack(each), base) for each in columns)]
        for index, (rows, first) in enumerate(rings, 1):
            ring = self.array(index)
            ring[mx.array([(first + i) % len(ring) for i in range(len(rows))])] = rows
            self.states.memory[self.part(index)] = ring.flatten()
