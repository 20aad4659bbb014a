"""The gated delta rule: as close to its formula as float32 allows, with the same bits for any chunks, after
rejected drafts, and from any saved state."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from long_forms import some
from processes import python

from kernels import device
from kernels.delta_net import TAPS, Heads, Places, States
from kernels.device import mx
from models.delta_net import run_formula

NEEDS_OPERATION = pytest.mark.skipif(
    not device.is_batch_invariant(), reason="our own product does not run here"
)
PLACES = Places(slots=2, checkpoints=2, log=16)
HEADS = [Heads(1, 2, 20, 48), Heads(2, 2, 16, 80), Heads(2, 6, 128, 16)]


class Layer(NamedTuple):
    """A layer's heads and weights, the tokens of a sequence, and the expected output for each token."""

    heads: Heads
    weights: np.ndarray  # of the convolution, followed by A and dt of each value head
    x: np.ndarray  # (tokens, inputs + 2 Hv)
    right: np.ndarray  # (tokens, Hv * Dv), in float64


def layer_of(heads: Heads, seed: int, tokens: int = 40) -> Layer:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=TAPS * heads.inputs + 2 * heads.Hv).astype(np.float32)
    x = rng.normal(size=(tokens, heads.inputs + 2 * heads.Hv)).astype(np.float32)
    return Layer(heads, weights, x, reference(heads, weights, x))


def reference(heads: Heads, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Compute S <- g S, then S <- S + k (rate (v - S^T k))^T, then S^T q, as in the papers."""
    Hk, Hv, Dk, Dv = heads
    weights, x = weights.astype(np.float64), x.astype(np.float64)
    taps = weights[: -2 * Hv].reshape(TAPS, -1)
    A, dt = weights[-2 * Hv : -Hv], weights[-Hv:]
    inputs = np.concatenate([np.zeros((TAPS - 1, heads.inputs)), x[:, : heads.inputs]])
    S = np.zeros((Hv, Dk, Dv))
    rows = []
    for i, token in enumerate(x):
        mixed = (inputs[i : i + TAPS] * taps).sum(axis=0)
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [Hk * Dk, 2 * Hk * Dk])
        q, k = (each.reshape(Hk, Dk).repeat(Hv // Hk, axis=0) for each in (q, k))
        q, k = (each / np.sqrt((each**2).sum(axis=1, keepdims=True) + 1e-6) for each in (q, k))
        a, beta = np.split(token[heads.inputs :], 2)
        S = S * np.exp(-np.exp(A) * np.log1p(np.exp(a + dt)))[:, None, None]
        d = (v.reshape(Hv, Dv) - np.einsum("hkv,hk->hv", S, k)) / (1 + np.exp(-beta))[:, None]
        S = S + k[:, :, None] * d[:, None]
        rows.append(np.einsum("hkv,hk->hv", S, q).flatten() * Dk**-0.5)
    return np.array(rows)


class Window(NamedTuple):
    """The fields of a window that the formula uses."""

    state_moves: list[tuple[int, int, int, int]]
    starts: list[int]
    L: int


class Sequence:
    """A sequence in one layer, which runs tokens and tracks where its state is."""

    def __init__(self, layer: Layer, states: States, run, place: int = -1, base: int = 0):
        self.layer, self.states, self.run = layer, states, run
        self.place, self.base = place, base

    def tokens(self, start: int, stop: int, target: int, keep: int) -> np.ndarray:
        move = (self.place, self.base, target, keep)
        y = self.run(
            self.states, mx.array(self.layer.x[start:stop]), [Window([move], [start], stop - start)]
        )
        self.place, self.base = target, keep
        return y

    def chunk(self, start: int, stop: int, target: int = 0) -> np.ndarray:
        return self.tokens(start, stop, target, stop - 1)

    def decode(self, start: int, stop: int, target: int = 0) -> np.ndarray:
        return self.tokens(start, stop, target, start)


def operation(states: States, x: mx.array, windows: list[Window]) -> mx.array:
    rows = []
    for window in windows:
        for (source, base, target, keep), start in zip(
            window.state_moves, window.starts, strict=True
        ):
            rows += [(source, base, row, target, keep) for row in range(start, start + window.L)]
    return states.change(x, mx.array(rows, mx.float32))


WAYS = [
    pytest.param(operation, marks=NEEDS_OPERATION, id="operation"),
    pytest.param(run_formula, id="formula"),
]


def states_of(layer: Layer) -> States:
    return States(PLACES, layer.heads, mx.array(layer.weights))


def random_cuts(layer: Layer, run, rng: np.random.Generator) -> np.ndarray:
    """Return the outputs of a sequence that is cut at random into chunks and partly rejected drafts, while its
    state moves between slots and checkpoints."""
    sequence = Sequence(layer, states_of(layer), run)
    found, row, end = [], 0, len(layer.x)
    while row < end:
        L = int(rng.integers(1, 17))
        L = min(L, end - row)
        if row == 0 or rng.random() < 0.4:
            found.append(sequence.chunk(row, row + L, target=int(rng.integers(4))))
            row += L
        else:
            accepted = int(rng.integers(1, L + 1))
            found.append(sequence.decode(row, row + L, target=int(rng.integers(2)))[:accepted])
            row += accepted
    return np.array(mx.concatenate(found))


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_formula_at_any_cut(heads, run):
    """Any split into chunks gives the rows of the formula. All chunks are in one lazy graph, so each operation
    depends on the previous ones."""
    layer = layer_of(heads, seed=3)
    whole = np.array(Sequence(layer, states_of(layer), run).chunk(0, len(layer.x)))
    assert np.abs(whole - layer.right).max() < 2e-5 * np.abs(layer.right).max()
    for seed in range(12 if run is operation else 2):
        cut = random_cuts(layer, run, np.random.default_rng(seed))
        assert np.array_equal(cut, whole) or run is not operation, seed
        assert np.abs(cut - whole).max() < 1e-5


@NEEDS_OPERATION
def test_sequences_of_a_pass_do_not_meet():
    """One operation runs a prompt and two forks of a checkpoint, one a decode with drafts, without mixing them."""
    layer = layer_of(HEADS[0], 1)
    another = layer._replace(x=layer_of(HEADS[0], 2).x)
    alone, other = (
        np.array(Sequence(each, states_of(each), operation).chunk(0, 40))
        for each in (layer, another)
    )
    states = states_of(layer)
    Sequence(layer, states, operation).chunk(0, 20, target=2)  # a checkpoint after 20 tokens
    windows = [
        Window([(-1, 0, 1, 11)], [0], 12),
        Window([(2, 19, 0, 20)], [20], 5),
        Window([(2, 19, 3, 23)], [19], 5),
    ]
    x = np.concatenate([another.x[:12], layer.x[20:25], layer.x[19:24]])
    y = np.array(operation(states, mx.array(x), windows))
    assert np.array_equal(y, np.concatenate([other[:12], alone[20:25], alone[19:24]]))


@NEEDS_OPERATION
@pytest.mark.parametrize("a", [-1e30, -200.0, -30.0, -1.0, 0.0, 0.5, 20.0, 88.0, 200.0, 1e30])
def test_gate_of_extreme_numbers(a):
    """With S = k v^T after the first token, the second one's output is g (k q) v."""
    heads = Heads(1, 1, 16, 16)
    weights = np.zeros(TAPS * heads.inputs + 2, np.float32)
    weights[(TAPS - 1) * heads.inputs : TAPS * heads.inputs] = 1  # taps use the newest token only
    x = np.ones((2, heads.inputs + 2), np.float32)
    x[1, 32:48], x[0, 49], x[1, 48:] = 0, 100, (a, -100)  # v = 0 and rate = 0 for the second token
    states = States(PLACES, heads, mx.array(weights))
    y = np.array(operation(states, mx.array(x), [Window([(-1, 0, 0, 1)], [0], 2)]))
    softplus = max(a, 0) + math.log1p(math.exp(-abs(a)))
    assert np.allclose(y[1], y[0] * math.exp(-softplus), rtol=1e-6, atol=1e-37)


WRONG = ["(2, 0, 0, 3)", "(0, 4, 0, 3)", "(0, 0, 4, 3)", "(0, 0, 0, 4)", "(4, 3, 0, 3)"]


@NEEDS_OPERATION
@pytest.mark.parametrize("move", some(WRONG, 2))
def test_a_wrong_move_ends_the_process(move):
    """If a row is no longer in the log, or a place does not exist, the process ends with one line before it
    misreads memory."""
    code = (
        "import sys; sys.path[:0] = ['tests/lib', 'tests/kernels']\n"
        "from test_delta_net import *\n"
        "layer = layer_of(HEADS[0], 0)\n"
        f"y = operation(states_of(layer), mx.array(layer.x[:1]), [Window([{move}], [3], 1)])\n"
        "mx.eval(y)\n"
    )
    done = python(code)
    assert done.returncode == -6, done
    assert "nanobatch: tokens 3..4, from " in done.stderr
