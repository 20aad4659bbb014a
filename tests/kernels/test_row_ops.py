"""Operations on rows behind the door of packed matrices: none is taken for numbers, nor numbers for
one, and no memory goes before its last use. (`tests/models/test_ops.py` holds them against their
formulas.)"""

import gc
from pathlib import Path

import numpy as np
import pytest
from processes import python

from kernels import mlx as device
from kernels.mlx import mx
from models.layers import Norm
from models.ops import softmax, swiglu

pytestmark = pytest.mark.skipif(
    not device.is_batch_invariant(), reason="our own product does not run here"
)

ROOT = Path(__file__).parents[2]


def normal(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def test_a_score_that_stands_alone_becomes_1():
    """MLX takes a matrix of one number for a turned one. So the score itself came out."""
    assert softmax(mx.array([[3.5], [-9.0]]), 0.3).tolist() == [[1], [1]]
    assert softmax(mx.array([[[7.0]]])).tolist() == [[[1]]]


def test_tiny_matrices_are_not_operations():
    """To look whether it is an operation must not read beyond it."""
    for N, K in ((1, 1), (2, 1), (1, 2)):
        x, w = normal(1, 5, K), normal(2, N, K)
        right = np.array(x, np.float64) @ np.array(w, np.float64).T
        assert np.allclose(np.array(x @ w.T), right, atol=1e-6)


def test_repeated_scales_and_widths():
    """An operation was found by the address of an array that was gone."""
    for turn in range(60):
        scale, width = 0.1 + turn % 7, 1 + turn % 11
        x = normal(turn, 3, 2 * width)
        powers = np.exp(scale * (np.array(x, np.float64) - np.array(mx.max(x, -1, keepdims=True))))
        right = powers / powers.sum(-1, keepdims=True)
        assert np.abs(np.array(softmax(x, scale)) - right).max() < 2**-22
        weight = normal(turn + 1, 2 * width)
        mean = (np.array(x, np.float64) ** 2).mean(-1, keepdims=True)
        right = np.array(x) / np.sqrt(mean + scale) * np.array(weight)
        assert np.abs(np.array(Norm.of(weight, scale)(x)) - right).max() < 1e-5


def test_lazy_norm_holds_its_weights():
    """The model was let go, and its memory given to others, before the graph was evaluated."""
    x = normal(1, 3, 512)
    for seed in range(6):
        weight = normal(seed, 512)
        right = np.array(Norm.of(weight, 1e-5)(x))
        later = Norm.of(weight, 1e-5)(x)
        del weight
        gc.collect()
        others = [mx.random.normal((512 + 16,)) for _ in range(8)]
        mx.eval(others)
        assert np.array_equal(np.array(later), right)


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_threads_change_no_bit(rows):
    """300 rows are shared out."""
    scores, gates = normal(1, rows, 333), normal(2, rows, 1000)
    norm = Norm.of(normal(3, 1000), 1e-5)
    for operation, x in ((softmax, scores), (swiglu, gates), (norm, gates)):
        alone = mx.concatenate([operation(x[row : row + 1]) for row in range(rows)])
        assert mx.array_equal(operation(x), alone)


def test_operation_used_as_a_matrix():
    """The process ends with one line, before memory is misread."""
    code = (
        "import sys; sys.path[:0] = ['tests/lib', 'tests/kernels']\n"
        "from kernels import matmul_library, mlx, row_ops\n"
        "from kernels.mlx import mx\n"
        "memory = row_ops.usual(matmul_library.SOFTMAX, 1.0)._memory\n"
        "mx.eval(mx.ones((2, 8)) @ mx.as_strided(memory, (8, 2), (1, 8)))\n"
    )
    done = python(code)
    assert done.returncode == -6, done
    assert "an operation of 0 x 0 is multiplied as 2 x 8" in done.stderr
