"""Operations on rows: none is taken for a matrix, nor a matrix for an operation, and memory lives until its
last use. (`tests/models/test_ops.py` compares them with their formulas.)"""

import gc
from pathlib import Path

import numpy as np
import pytest
from processes import python

from kernels import device
from kernels.device import mx
from models.layers import Norm

pytestmark = pytest.mark.skipif(
    not device.is_batch_invariant(), reason="our own product does not run here"
)

ROOT = Path(__file__).parents[2]


def normal(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def test_tiny_matrices_are_not_operations():
    """The check for an operation must not read beyond a tiny matrix."""
    for N, K in ((1, 1), (2, 1), (1, 2)):
        x, w = normal(1, 5, K), normal(2, N, K)
        right = np.array(x, np.float64) @ np.array(w, np.float64).T
        assert np.allclose(np.array(x @ w.T), right, atol=1e-6)


def test_lazy_norm_holds_its_weights():
    """Regression: the model was freed and its memory reused before the graph was evaluated."""
    x = normal(1, 3, 512)
    for seed in range(6):
        weight = normal(seed, 512)
        right = np.array(Norm.from_weight(weight, 1e-5)(x))
        later = Norm.from_weight(weight, 1e-5)(x)
        del weight
        gc.collect()
        others = [mx.random.normal((512 + 16,)) for _ in range(8)]
        mx.eval(others)
        assert np.array_equal(np.array(later), right)


def test_operation_used_as_a_matrix():
    """The process ends with one line before it misreads memory."""
    code = (
        "import sys; sys.path[:0] = ['tests/lib', 'tests/kernels']\n"
        "from kernels import device, library, row_ops\n"
        "from kernels.device import mx\n"
        "memory = row_ops.usual(library.SOFTMAX, 1.0)._memory\n"
        "mx.eval(mx.ones((2, 8)) @ mx.as_strided(memory, (8, 2), (1, 8)))\n"
    )
    done = python(code)
    assert done.returncode == -6, done
    assert "an operation of 0 x 0 is multiplied as 2 x 8" in done.stderr
