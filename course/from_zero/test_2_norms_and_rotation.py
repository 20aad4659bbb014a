"""Stage 2: norms and rotation. You write `rms_norm` and `swiglu` in ops.py, `rotate` and
`rope_angles` in rope.py."""

import math

import pytest

from course.from_zero.shared_by_tests import (
    ANSWERS,
    SUM,
    assert_close,
    demo,
    ids_of,
    logits,
    new_slab,
    text_of,
)
from course.from_zero.small_llama import answer
from kernels.device import mx
from models import ops, rope


@pytest.mark.about("rms_norm")
def test_norm():
    """A norm gives each row the same size: x / sqrt(mean(x^2) + eps) * weight."""
    norm = ops.rms_norm(mx.array([1.0, 10.0]), 1e-5)
    assert callable(norm), "rms_norm returns a function of x"
    x = mx.array([[3.0, 4.0], [300.0, 400.0], [0.3, -0.4]])
    root = math.sqrt((3**2 + 4**2) / 2)
    wanted = mx.array([[3 / root, 40 / root], [3 / root, 40 / root], [3 / root, -40 / root]])
    assert_close(norm(x[:, None]), wanted[:, None], "the norm", 1e-3)


@pytest.mark.about("rms_norm")
def test_norm_of_zeros():
    """eps keeps a small row small, and prevents a division by zero."""
    norm = ops.rms_norm(mx.ones(2), 1e-2)
    assert_close(norm(mx.zeros((1, 2))), mx.zeros((1, 2)), "the norm of zeros")
    assert_close(norm(mx.array([[0.1, 0.1]])), mx.full((1, 2), 0.5**0.5), "the norm of 0.1, 0.1")


@pytest.mark.about("swiglu")
def test_swiglu():
    """The gate opens for numbers above zero: gate / (1 + e^-gate) * up."""
    gate_up = mx.array([[0.0, 1.0, -1.0, 9.0, 5.0, 2.0, 2.0, 3.0]])  # 4 of gate, then 4 of up
    half = 1 / (1 + math.exp(-1))
    wanted = mx.array([[0.0, half * 2, -(1 - half) * 2, 27 / (1 + math.exp(-9))]])
    assert_close(ops.swiglu(gate_up), wanted, "swiglu")
    far = ops.swiglu(mx.array([[100.0, -100.0, 1.0, 1.0]]))
    assert_close(far, mx.array([[100.0, 0.0]]), "swiglu of 100 and -100")


@pytest.mark.about("rotate")
def test_rotate():
    """Numbers i and i + Dh/2 are rotated as a point in a plane."""
    angles = mx.array([[[0.0, math.pi / 2]], [[math.pi, 0.0]]])  # for 2 tokens, in 2 planes
    cos, sin = rope.both_of_a_plane(mx.cos(angles), mx.sin(angles))
    x = mx.broadcast_to(mx.array([1.0, 2.0, 3.0, 4.0]), (2, 3, 4))  # the points (1, 3), (2, 4)
    turned = [[1.0, -4.0, 3.0, 2.0], [-1.0, 2.0, -3.0, 4.0]]
    wanted = mx.broadcast_to(mx.array(turned)[:, None], (2, 3, 4))  # the same in 3 heads
    assert_close(rope.rotate(x, cos, sin), wanted, "what was turned")


@pytest.mark.about("rope_angles")
def test_rope_angles():
    """Position 0 is not rotated, and position p is rotated by p times each plane's frequency."""
    kind = demo()[0].kinds[0]
    cos, sin = rope.rope_angles(kind, mx.array([0, 1, 40, 300]))
    for row, p in enumerate((0, 1, 40, 300)):
        angles = [p * frequency for frequency in kind.frequencies.tolist()]
        cosines = mx.array([[math.cos(angle) for angle in angles * 2]])
        sines = [math.sin(angle) for angle in angles]
        assert_close(cos[row], cosines, f"cos of position {p}")
        assert_close(sin[row], mx.array([[-s for s in sines] + sines]), f"sin of position {p}")


def test_an_answer():
    """The answer is right with your norms and your rotation."""
    slab = new_slab()
    said = answer(ids_of(), lambda ids, windows: logits(ids, slab, windows[0].starts[0]))
    assert text_of(said) == ANSWERS[SUM]
    print(f"{SUM}  ->  {text_of(said)}")
