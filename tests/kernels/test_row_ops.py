"""Operations on rows: the C library never mistakes one for a matrix or a matrix for one, and memory lives
until its last use. (`tests/models/test_ops.py` compares the operations with their formulas.)"""

import gc
from pathlib import Path

import numpy as np
import pytest
from processes import python

from kernels import device, row_ops
from kernels.device import mx
from models.layers import Norm
from models.rope import rotate

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
    """Regression: the weights were freed and their memory reused before the graph was evaluated."""
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


@pytest.mark.parametrize(("N", "heads", "Dh"), [(1, 18, 128), (7, 3, 64), (40, 9, 80), (5, 2, 6)])
def test_rope_has_the_bits_of_its_formula(N, heads, Dh):
    x = normal(1, N, heads + 2, Dh)[:, :heads]
    cos, sin = normal(2, N, 1, Dh), normal(3, N, 1, Dh)
    ours = np.array(row_ops.Rotation(cos, sin)(x))
    assert np.array_equal(ours, np.array(rotate(x, cos, sin)))


def test_float16_has_the_bits_of_mlx_and_no_infinity():
    """Test denormal numbers, numbers halfway between two float16 numbers, and numbers out of range."""
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32, endpoint=False)
    bits[::2] = bits[::2] % 0x20000000 + 0x2F000000  # most are in float16's range
    bits[::5] &= 0xFFFFF000
    ends = [65504, 65519.996, 65520, -65520, 65536, 2**-25, 2**-24, np.inf, -np.inf, np.nan, -0.0]
    x = mx.array(np.concatenate([bits.view(np.float32), np.array(ends * 2, np.float32)]))
    ours = np.array(row_ops.narrowed(x, mx.float16))
    theirs = np.array(x.astype(mx.float16))
    is_finite = np.isfinite(theirs)
    assert 0.3 < is_finite.mean() < 1
    assert np.array_equal(ours[is_finite].view(np.uint16), theirs[is_finite].view(np.uint16))
    assert np.isnan(ours[~is_finite]).all()
