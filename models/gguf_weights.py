"""Convert the tensors of a GGUF file to MLX's quantization: integers, scales, and offsets.

A weight is scale * number + offset, with one scale and one offset per group of numbers. Each supported
type converts without loss, because a product of two of its factors has at most 24 bits. If the offset is
always the same multiple of the scale, the `center`, no offsets are stored:

    type         a weight                     bits  group  scale    offset, or center
    Q4_0, Q8_0   d (q - 8), d q               4, 8  32     d        center -8, -128
    Q5_0         d (q - 16)                   5     32     d        center -16
    Q4_1, Q5_1   d q + m                      4, 5  32     d        m
    Q4_K, Q5_K   (d s) q - (dmin m)           4, 5  32     d s      -dmin m
    Q6_K         (d s) (q - 32)               6     16     d s      center -32
    MXFP4        d (q - 12)                   5     32     d        center -12; four bits index q

A K-quant has float16 numbers d and dmin per 256 weights, and bytes s and m per group. They are kept in
this form (`widened` in `kernels/packed.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from base.untrusted_files import ModelError
from kernels import library
from kernels.device import mx
from kernels.packed import SPAN, Blocks, widened, words
from models import mxfp4
from models.config import Config
from models.gguf_config import FREQUENCIES, is_drafting, names, renamed
from models.gguf_file import GgufTensor, read_gguf
from models.weights import Tensor, Weights

PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
# general.file_type -> its name; files of other types contain unsupported tensor types
FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
    38: "MXFP4_MOE",
}
CHUNK = 2**24  # weights decoded at a time

# Decoded blocks: numbers, scales, and offsets if the type has them. K-quants: numbers, scales as bytes and
# their factor, offsets as bytes and their factor
Decoded = tuple[mx.array, ...]


# --- decoding blocks ------------------------------------------------------------------------------


def half(blocks: mx.array, at: int) -> mx.array:  # (n, bytes) -> (n, 1)
    """Read the float16 number at this byte offset of each block."""
    return mx.contiguous(blocks[:, at : at + 2]).view(mx.float16)


def nibbles(bytes_: mx.array) -> mx.array:  # (..., n) -> (..., 2 n)
    """Return the lower four bits of all bytes, followed by the upper four bits of all bytes."""
    return mx.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def bits(bytes_: mx.array) -> mx.array:  # (n, k) -> (n, 8 k)
    """Unpack bytes into bits, the lowest first."""
    each = bytes_[..., None] >> mx.arange(8, dtype=mx.uint8) & 1
    return each.flatten(1)


def q4_0(blocks: mx.array) -> Decoded:
    return nibbles(blocks[:, 2:]), half(blocks, 0)


def q4_1(blocks: mx.array) -> Decoded:
    return nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def q5_0(blocks: mx.array) -> Decoded:
    return nibbles(blocks[:, 6:]) | bits(blocks[:, 2:6]) << 4, half(blocks, 0)


def q5_1(blocks: mx.array) -> Decoded:
    numbers = nibbles(blocks[:, 8:]) | bits(blocks[:, 4:8]) << 4
    return numbers, half(blocks, 0), half(blocks, 2)


def q8_0(blocks: mx.array) -> Decoded:
    return blocks[:, 2:] ^ 128, half(blocks, 0)  # signed numbers become unsigned: plus 128


def six_bits(blocks: mx.array) -> Decoded:  # (n, bytes) -> (n, 8), (n, 1), (n, 8), (n, 1)
    """Unpack the 6-bit scales and offsets of Q4_K and Q5_K. The upper two bits of the last four share
    bytes with the first four."""
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = mx.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minima = mx.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scales + 128, half(blocks, 0), minima + 128, -half(blocks, 2)


def q4_k(blocks: mx.array) -> Decoded:
    numbers = nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return numbers.flatten(1), *six_bits(blocks)


def q5_k(blocks: mx.array) -> Decoded:
    numbers = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> mx.arange(8, dtype=mx.uint8)[:, None] & 1
    return (numbers | fifth << 4).flatten(1), *six_bits(blocks)


def q6_k(blocks: mx.array) -> Decoded:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64))  # (n, 2, 128)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> mx.array([[0], [2], [4], [6]], mx.uint8) & 3
    scales = blocks[:, 192:208] ^ 128
    return (low | high.flatten(2) << 4).flatten(1), scales, half(blocks, 208)


def mxfp4_blocks(blocks: mx.array) -> Decoded:
    numbers = mx.array(mxfp4.NUMBERS, mx.uint8)[nibbles(blocks[:, 1:])]
    return numbers, mxfp4.powers(blocks[:, :1])


class BlockFormat(NamedTuple):
    decode: Callable[[mx.array], Decoded]
    bits: int
    group: int
    factors: mx.Dtype = mx.float16  # dtype of scales and offsets
    center: float = 0.0  # if not 0, each offset is its scale times this


FORMS = {
    "Q4_0": BlockFormat(q4_0, 4, 32, center=-8),
    "Q4_1": BlockFormat(q4_1, 4, 32),
    "Q5_0": BlockFormat(q5_0, 5, 32, center=-16),
    "Q5_1": BlockFormat(q5_1, 5, 32),
    "Q8_0": BlockFormat(q8_0, 8, 32, center=-128),
    "Q4_K": BlockFormat(q4_k, 4, 32, mx.uint8),
    "Q5_K": BlockFormat(q5_k, 5, 32, mx.uint8),
    "Q6_K": BlockFormat(q6_k, 6, 16, mx.uint8, -32),
    "MXFP4": BlockFormat(mxfp4_blocks, mxfp4.BITS, mxfp4.GROUP, mx.bfloat16, mxfp4.CENTER),
}


# --- the tensors of a file ------------------------------------------------------------------------


class GgufWeights(Weights):
    """The weights of a GGUF file, where a packed matrix is a single tensor. Reading its weight decodes
    the tensor and keeps the scales and offsets until they are read, too."""

    described_by = "its metadata"

    def __init__(self, path: Path):
        self.file = file = read_gguf(path)
        self.folder = path
        self._names = names(file)
        self._decoded: dict[str, mx.array] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in file.tensors.items():
            if name != FREQUENCIES and not is_drafting(name, file):  # frequencies are in the config
                self.tensors |= parts(tensor, renamed(name, self._names))

    def quantization(self, config: Config) -> str:
        """Return the type that the file's metadata names. (Counting tensors would be misleading: most tensors of a
        small Q4_K_M are Q5_0.)"""
        kind = self.file.fields.get("general.file_type")
        named = FILE_TYPES.get(kind) if isinstance(kind, int) else None
        return named or super().quantization(config)

    def _stored_as(self, name: str) -> str:
        return self.file.tensors[self.tensors[name].name].type.name

    def _lacks(self, name: str) -> ModelError:
        theirs = {ours: theirs for theirs, ours in self._names.items()}
        return super()._lacks(renamed(name, theirs))

    def _packing(self, module: str, shape: tuple[int, ...]) -> tuple[int, int, float]:
        stored = self.file.tensors[self.tensors[f"{module}.weight"].name]
        if stored.shape != shape or len(shape) == 1:
            raise ModelError(
                f"{stored.path}: {stored.name} has the shape {stored.shape} and the type {stored.type.name}, "
                f"but {self.described_by} implies {shape}; download it again."
            )
        form = FORMS[stored.type.name]
        return form.bits, form.group, form.center

    def blocks_of(self, name: str) -> Blocks | None:
        stored = self.file.tensors[self.tensors[name].name]
        kind = stored.type.name
        if kind not in FORMS:
            return None
        where = stored.path, stored.name, stored.begin, stored.shape[-1]
        return Blocks(getattr(library, kind), FORMS[kind].factors, *where)

    def _read(self, tensor: Tensor, as_codes: bool = False) -> mx.array:
        name = re.sub(r"\.(scales|biases)$", ".weight", tensor.name)
        stored = self.file.tensors[name]
        if tensor.name not in self._decoded:
            self._decoded |= decoded(stored)
        array = self._decoded.pop(tensor.name)
        if stored.type.name in PLAIN:
            array = array.reshape(tensor.shape)
        if stored.name.endswith(".ssm_a"):
            return self._log_of_minus(tensor, array)
        is_bytes = array.dtype == mx.uint8
        numbers = widened(array, FORMS[stored.type.name].group) if is_bytes else array
        self._check_numbers(tensor, numbers)
        return array

    def _log_of_minus(self, tensor: Tensor, array: mx.array) -> mx.array:
        """Return a delta net's A_log. The file stores -exp(A_log)."""
        if not (array < 0).all():
            raise ModelError(
                f"{tensor.path}: {tensor.name} holds numbers that are not negative; download it again."
            )
        found = mx.log(-array.astype(mx.float32))
        self._check_numbers(tensor, found)
        return found


def parts(stored: GgufTensor, ours: str) -> dict[str, Tensor]:
    """Return the tensors that replace a tensor of the file, by our names."""
    kind = stored.type.name
    if kind in PLAIN:
        shape = stored.shape
        if ours.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)
        return {ours: Tensor(stored.path, stored.name, PLAIN[kind], shape)}
    form = FORMS[kind]
    *out, width = stored.shape
    module = ours.removesuffix(".weight")
    base = stored.name.removesuffix(".weight")
    groups = width // form.group
    if form.factors == mx.uint8:
        groups += 2 * width // SPAN
    shape = (*out, groups)
    named = {ours: Tensor(stored.path, stored.name, mx.uint32, (*out, width * form.bits // 32))}
    for part in ("scales",) if form.center else ("scales", "biases"):
        named[f"{module}.{part}"] = Tensor(stored.path, f"{base}.{part}", form.factors, shape)
    return named


def decoded(stored: GgufTensor) -> dict[str, mx.array]:
    """Decode a tensor of the file. Return arrays by the names that `parts` gives them."""
    kind = stored.type.name
    if kind in PLAIN:
        dtype = PLAIN[kind]
        chunks = [mx.contiguous(chunk).view(dtype).flatten() for chunk in blocks_of(stored)]
        return {stored.name: mx.concatenate(chunks).reshape(stored.shape)}
    form = FORMS[kind]
    found = []
    for blocks in blocks_of(stored):
        numbers, *factors = form.decode(blocks)
        arrays = [words(numbers, form.bits), *factors]
        mx.eval(arrays)
        found.append([array.flatten() for array in arrays])
    *out, _ = stored.shape
    arrays = [mx.concatenate(chunks).reshape(*out, -1) for chunks in zip(*found, strict=True)]
    if form.factors == mx.uint8:
        weight, *factors = arrays
        pairs = zip(factors[::2], factors[1::2], strict=True)
        arrays = [weight, *(beside(*pair) for pair in pairs)]
    base = stored.name.removesuffix(".weight")
    # Without offsets there is no array for the last name
    return dict(zip((stored.name, f"{base}.scales", f"{base}.biases"), arrays, strict=False))


def beside(factors: mx.array, sizes: mx.array) -> mx.array:
    """Concatenate bytes and their factors row by row, as `widened` expects them."""
    return mx.concatenate([factors, sizes.view(mx.uint8)], axis=-1)


def blocks_of(stored: GgufTensor) -> Iterator[mx.array]:  # each (n, bytes of a block)
    block, nbytes = stored.type.block, stored.type.nbytes
    most = CHUNK // block * nbytes
    for data in stored.read_pieces(most):
        yield mx.array(memoryview(data)).reshape(-1, nbytes)
