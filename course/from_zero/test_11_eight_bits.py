"""Stage 11: keys and values in 8 bits. You write `quantize`, `dequantize`, and `write` and `read` of
`SmallWindow`, in eight_bits.py."""

import math

import pytest

from course.from_zero.reference import eight_bits
from course.from_zero.shared_by_tests import assert_close, drawn, numbered, row_pictures
from course.from_zero.small_llama import DH, HKV, LAYERS, Rows, answer, forward, tokenizer
from kernels.device import mx


@pytest.mark.about("quantize")
def test_codes():
    """The largest number of a row has the code 127 or -127, and the scale is 1/127 of its size."""
    for row, wanted, scale in (
        ([0.31, -1.20, 0.05, 2.54], [16, -60, 2, 127], 0.02),
        ([-254.0, 127.0, 0.9, 3.1], [-127, 64, 0, 2], 2.0),
        ([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], 0.0),
    ):
        codes, scales = eight_bits.quantize(mx.array([[row]]))
        assert (codes.dtype, scales.dtype) == (mx.int8, mx.float32)
        assert codes.tolist() == [[wanted]]
        assert_close(scales, mx.array([[[scale]]]), "the scale")


@pytest.mark.about("quantize")
def test_alone():
    """A row has the same codes and scale alone as next to others: no rows or heads share a
    scale."""
    x = mx.exp(drawn((5, 3, 1), 3)) * drawn((5, 3, 8), 4)
    codes, scale = eight_bits.quantize(x)
    assert scale.shape == (5, 3, 1), "a scale for each row and head"
    for row in range(5):
        for head in range(3):
            alone, one = eight_bits.quantize(x[row : row + 1, head : head + 1])
            came = codes[row, head].tolist(), scale[row, head].tolist()
            assert came == (alone[0, 0].tolist(), one[0, 0].tolist()), f"row {row}, head {head}"


@pytest.mark.about("quantize", "dequantize")
def test_error():
    """Numbers are read with an error of at most half a scale, however large or small they are."""
    size = mx.exp(8 * drawn((64, 3, 1), 1))
    x = size * drawn((64, 3, 32), 2)
    codes, scale = eight_bits.quantize(x)
    found = eight_bits.dequantize(codes, scale)
    assert found.shape == x.shape and found.dtype == mx.float32
    most = (mx.abs(found - x).max(axis=-1) / mx.abs(x).max(axis=-1)).max().item()
    assert most <= 0.501 / 127, f"off by {127 * most:.2f} scales, but only 0.5 is allowed"


@pytest.mark.about("quantize", "dequantize")
def test_not_finite():
    """A row with NaN or infinity is not read as finite numbers, and does not affect other rows."""
    for bad in (math.nan, math.inf, -math.inf):
        x = mx.ones((3, 1, 4))
        x[1, 0, 2] = bad
        found = eight_bits.dequantize(*eight_bits.quantize(x))
        came = found[1, 0].tolist()
        assert not any(map(math.isfinite, came)), f"{x[1, 0].tolist()} is read as {came}"
        assert_close(found[::2], mx.ones((2, 1, 4)), "the rows next to it")


def write(slots: list[int], starts: list[int], k: mx.array) -> eight_bits.SmallSlab:
    slab = eight_bits.SmallSlab(2, 5, 2, 32, 4)
    eight_bits.SmallWindow(slab, slots, starts, len(k) // len(slots)).write(1, k, k + 20)
    return slab


@pytest.mark.about("write")
def test_write():
    """Rows are written to their slots, and their scales next to them."""
    slab = write([3, 1], [6, 3], numbered(4))
    assert row_pictures([127 * scale for scale in slab.scales], "slot")[::2] == [
        "layer 1, k, slot 1, head 0  .  .  .  3  4  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, k, slot 3, head 0  .  .  .  .  .  .  1  2  .  .  .  .  .  .  .  .",
        "layer 1, v, slot 1, head 0  .  .  . 23 24  .  .  .  .  .  .  .  .  .  .  .",
        "layer 1, v, slot 3, head 0  .  .  .  .  .  . 21 22  .  .  .  .  .  .  .  .",
    ]
    assert row_pictures(slab.codes, "slot")[-1].endswith("127 127  .  .  .  .  .  .  .  .")


@pytest.mark.about("write", "read")
def test_read():
    """What is read is what was written, up to half a scale."""
    k = drawn((10, 2, 4), 5)
    slab = write([3, 1], [0, 0], k)
    window = eight_bits.SmallWindow(slab, [3, 1], [4, 4], 1)
    for i, group in enumerate(window.groups):
        keys, values = window.read(1, group)
        mine = k[5 * i : 5 * i + 5].swapaxes(0, 1)[None]
        assert_close(keys, mine, f"the keys of slot {window.slots[i]}", 0.02)
        assert_close(values, mine + 20, "its values", 0.01)


def test_logits():
    """Logits change a little, answers do not, and the memory is little more than a quarter."""
    print("                               logits off by    likeliest tokens that differ")
    for prompt in ("What is 17 + 6?", "Tell me a story about a fox.", "Count from 3 to 20."):
        ids = tokenizer().ask(prompt)
        ids += answer(ids)
        plain = forward(ids, [Rows().at(0, len(ids))])
        slab = eight_bits.SmallSlab(LAYERS, 1, HKV, 128, DH)
        small = forward(ids, [eight_bits.SmallWindow(slab, [0], [0], len(ids))])
        off = mx.abs(small - plain).max().item()
        assert 0 < off < 0.6, f"{prompt}: logits are off by {off:.2f}"
        others = (mx.argmax(small, axis=-1) != mx.argmax(plain, axis=-1)).sum().item()
        print(f"{prompt:<30} {off:>13.2f} {others:>19} of {len(ids)}")
    print(f"the memory is {slab.nbytes / (LAYERS * 2 * HKV * 128 * DH * 4):.0%} of float32")
    x = drawn((1, 1, 64), 6)
    for large in (1, 100):
        x[0, 0, 63] = large
        off = mx.abs(eight_bits.dequantize(*eight_bits.quantize(x)) - x)[:, :, :63].mean().item()
        print(f"a row whose last number is {large:>3}: the others are off by {off:.3f}")
