"""From a folder to a model: weights in the form that `forward` wants, and slots that fit the memory beside them.

The problem. A checkpoint stores what was convenient to train: queries, keys and values apart, in half precision or
packed into a few bits. The forward pass wants one matrix for each product, in the order and precision that the device
multiplies fastest. And memory that runs out is no exception in MLX: the process dies.

What this file keeps. A model and its slab are measured before the first tensor is read: what does not fit is refused,
with sizes that would. Tensors are taken layer by layer, so the files' copy and ours never stand in memory together.

Where next: `checkpoint.py`, for what a folder holds; `ops.py`, for what the weights are made into.
"""

from __future__ import annotations

import math
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kv import BUCKET, Slab
from parts import checks, device
from parts.checkpoint import Config, read_config
from parts.device import has_gpu, mx, readable, tree_flatten
from parts.fields import ModelError
from parts.ops import Capped, Dense, Experts, Kind, Mlp, Quantized, SideBySide, Stack
from parts.ranks import ALONE, Ranks, Share
from parts.weights import DTYPES, Weights, quantization


class Layer(NamedTuple):
    qkv: Dense | Quantized | SideBySide  # D -> (H + 2 Hkv) * Dh
    o: Dense | Quantized  # H * Dh -> D
    mlp: Mlp | Experts  # D -> D
    kind: int = 0  # of attention: which of the model's `kinds`
    attn_norm: mx.array | None = None  # (D,), of what goes into attention; None where the family has none
    attn_after: mx.array | None = None  # of what comes out of it
    mlp_norm: mx.array | None = None
    mlp_after: mx.array | None = None
    q_norm: mx.array | None = None  # (Dh,), or (H * Dh,) and (Hkv * Dh,)
    k_norm: mx.array | None = None


@dataclass(frozen=True)
class Model:
    """A config and its weights, ready for `forward`."""

    config: Config
    layers: list[Layer]
    norm: mx.array  # (D,)
    table: Dense | Quantized  # the embedding, as a projection D -> V
    head: Dense | Quantized | Capped | None  # D -> V; the table where the checkpoint ties them; None on a follower
    kinds: tuple[Kind, ...]  # how attention treats positions, each in some of the layers
    ranks: Ranks = ALONE  # who has the other shares of it; config and layers are this one's

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.dtype

    @property
    def is_float32(self) -> bool:
        """Are all weights float32 numbers: none in half precision, none packed into a few bits?"""
        weights = tree_flatten((self.layers, self.norm, self.table, self.head))
        return all(weight.dtype == mx.float32 for _, weight in weights if isinstance(weight, mx.array))

    @staticmethod
    def load(folder: Path, dtype: str = "auto") -> Model:
        return ModelReader(folder, dtype).read()


class ModelReader:
    """Takes a checkpoint's tensors one by one and gives them the shape that `forward` wants.

    `dtype` is "float32", "checkpoint" (as the files have it), or "auto": float32 on a CPU, else the files'. On a CPU
    only float32 matrix products are fast, the others are 10 to 50 times slower; quantized ones become float32, too.
    Names, shapes and memory are checked at once; nothing is read before `read`. Of `ranks` each reads its share.
    """

    def __init__(self, folder: Path, dtype: str = "auto", ranks: Ranks = ALONE):
        if dtype not in ("auto", "float32", "checkpoint"):
            raise ValueError(f"dtype = {checks.shown(dtype)}; choose auto, float32 or checkpoint")
        self.folder, self.ranks = folder, ranks
        self.float32 = dtype == "float32" or (dtype == "auto" and not has_gpu())
        self.weights = Weights(folder)
        config = read_config(folder, self.weights.has_head)
        self.weights.check_against(config)
        self.shapes = config.tensors()
        self.share = Share.of(config, ranks.rank, ranks.size)
        self.config = self.share.config(config)
        self.nbytes = self.weights.nbytes(config, self.config, self.float32, has_head=not ranks.rank)
        free = device.free_memory()
        if free is not None and self.nbytes > free:
            raise ModelError(
                f"{folder}: {readable(self.nbytes)} of weights, but {readable(free)} of memory are free; "
                f"choose a smaller model{', or more ranks' * (ranks.size > 1)}."
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one number of the activations, and so of the slab."""
        return 4 if self.float32 else DTYPES[self.weights.entries["model.norm.weight"]["dtype"]].size

    def fit(self, **options) -> Sizes:
        """What would fit beside the weights: a slab that is too large is refused before they are read."""
        free = device.free_memory()
        return fit(self.config, self.itemsize, None if free is None else free - self.nbytes, **options)

    def read(self) -> Model:
        c = self.config
        # One layer at a time, evaluated at once: else the files' copy and ours would stand in memory together.
        positions = [c.positions(i) for i in range(c.layers)]
        kinds = list(dict.fromkeys(positions))
        layers = [self.layer(f"model.layers.{i}.", kinds.index(each)) for i, each in enumerate(positions)]
        norm, table = self.tensor("model.norm.weight"), self.linear("model.embed_tokens")
        head = None if self.ranks.rank else table if c.tied else self.linear("lm_head")
        if head and c.head_cap:
            head = Capped(head, c.head_cap)
        kinds = tuple(Kind.of(*each, c.Dh, norm.dtype) for each in kinds)
        mx.eval(norm, table, head, [(kind.frequencies, kind.periods) for kind in kinds])
        return Model(c, layers, norm, table, head, kinds, self.ranks)

    def layer(self, name: str, kind: int) -> Layer:
        if device.exiting.is_set():
            raise RuntimeError("the program is ending")
        norms = dict(self.config.norms)
        if self.config.qk_norm:
            norms |= {f"{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
        layer = Layer(
            kind=kind,
            **{norm: self.tensor(f"{name}{module}.weight") for norm, module in norms.items()},
            qkv=self.linear(*(f"{name}self_attn.{part}_proj" for part in "qkv")),
            o=self.linear(f"{name}self_attn.o_proj"),
            mlp=self.mlp(f"{name}mlp."),
        )
        mx.eval(layer)
        return layer

    def mlp(self, name: str) -> Mlp | Experts:
        if self.config.experts:
            stacks = [self.stack(f"{name}experts.{part}_proj") for part in ("gate", "up", "down")]
            return Experts(self.linear(f"{name}gate"), *stacks, self.config.taken, self.config.whole_shares)
        gate_up = self.linear(f"{name}gate_proj", f"{name}up_proj")
        return Mlp(gate_up, self.linear(f"{name}down_proj"), self.config.gelu)

    def tensor(self, name: str) -> mx.array:
        """A tensor in our precision, times what its module's output is multiplied by."""
        array, factor = self.take(name), self.config.multipliers.get(name.split(".")[-2], 1)
        dtype = mx.float32 if self.float32 else array.dtype
        if self.config.norms_add and name.endswith("norm.weight"):
            return ((1 + array.astype(mx.float32)) * factor).astype(dtype)
        return array.astype(dtype) if factor == 1 else (array.astype(mx.float32) * factor).astype(dtype)

    def take(self, name: str) -> mx.array:
        """A tensor as the files have it; of queries and keys, with each head's numbers in the order of `Rope.order`."""
        array, order = self.weights.take(name), self.config.rope.order(self.config.Dh)
        if name.split(".")[-2] not in ("q_proj", "k_proj", "q_norm", "k_norm") or order == sorted(order):
            return array
        return array.reshape(-1, self.config.Dh, *array.shape[1:])[:, mx.array(order)].reshape(array.shape)

    def linear(self, *modules: str) -> Dense | Quantized | SideBySide:
        """One projection, or several of the same input as one."""
        parts = [self.part(module) for module in modules]
        if not any(isinstance(part, Quantized) for part in parts):
            return Dense.of(parts)
        parts = [part if isinstance(part, Quantized) else Dense.of([part]) for part in parts]
        if len(parts) == 1:
            return parts[0]
        packed_alike = len({(part.bits, part.group) if isinstance(part, Quantized) else None for part in parts}) == 1
        return Quantized.of(parts) if packed_alike else SideBySide(tuple(parts))

    def stack(self, module: str) -> Stack:
        if f"{module}.scales" not in self.weights.entries:
            return Stack(self.tensor(f"{module}.weight"))
        packed = self.take(f"{module}.weight"), self.tensor(f"{module}.scales"), self.tensor(f"{module}.biases")
        bits, group = quantization(packed[0].shape, packed[1].shape, self.shapes[f"{module}.weight"][-1])
        if self.float32:
            return Stack(mx.dequantize(*packed, group_size=group, bits=bits))
        return Stack(*packed, bits, group)

    def part(self, module: str) -> Quantized | tuple[mx.array, mx.array | None]:
        """A module as the checkpoint has it: quantized, or its weight (out, in) and bias. A rank has its share."""
        has, (rows, columns) = self.weights.entries, (None, None)
        if self.ranks.size > 1:
            rows, columns = self.share.cut(module, self.config.Dh)
        bias = self.tensor(f"{module}.bias") if f"{module}.bias" in has else None
        if bias is not None and rows:
            bias = bias[rows.start : rows.stop]
        elif columns and self.ranks.rank:
            bias = None  # each rank adds to the sum, and this is to be added once
        if f"{module}.scales" not in has:
            return cut_out(self.tensor(f"{module}.weight"), rows, columns), bias
        weight = self.take(f"{module}.weight")
        scales, offsets = self.tensor(f"{module}.scales"), self.tensor(f"{module}.biases")
        bits, group = quantization(weight.shape, scales.shape, self.shapes[f"{module}.weight"][1])
        if not self.float32 and (columns is None or columns.start % group == columns.stop % group == 0):
            packed = columns and range(columns.start * bits // 32, columns.stop * bits // 32)
            groups = columns and range(columns.start // group, columns.stop // group)
            scales, offsets = (cut_out(each, rows, groups) for each in (scales, offsets))
            return Quantized(cut_out(weight, rows, packed), scales, offsets, bias, bits, group)
        return cut_out(mx.dequantize(weight, scales, offsets, group_size=group, bits=bits), rows, columns), bias


def cut_out(matrix: mx.array, rows: range | None, columns: range | None) -> mx.array:
    """These rows or columns, copied: a view would keep the whole in memory."""
    if rows:
        return matrix[rows.start : rows.stop]  # always joined with other rows, which copies them
    return mx.contiguous(matrix[:, columns.start : columns.stop]) if columns else matrix


# --- does it fit? ------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What an engine is made with, and a line about it."""

    slots: int
    max_len: int  # of a slot, in tokens
    chunk: int
    budget: int
    summary: str


def fit(
    c: Config,
    itemsize: int,
    free: int | None,
    slots: int | None = None,
    max_len: int | None = None,
    chunk: int | None = None,
    budget: int | None = None,
    usual_len: int = 1024,
    **other,  # options of an engine that take no memory
) -> Sizes:
    """Slots and their length as asked for, or chosen to fit the memory. A ValueError if that cannot be.

    `itemsize` is the bytes of one number in the slab, `free` those that can be taken.
    """
    for name, value in (("slots", slots), ("max_len", max_len), ("chunk", chunk), ("budget", budget)):
        if value is not None:
            checks.whole(name, value, 1, 2**31 - 1)
    if chunk is None:
        chunk = 512 if has_gpu() else 128  # a CPU is as quick with 128 tokens at a time, a GPU is not
    if chunk % BUCKET:
        raise ValueError(f"chunk = {chunk}, but it must be a multiple of {BUCKET}")
    count, length = slots or 8, max_len or min(usual_len, c.max_positions)
    room = math.inf if free is None else 0.9 * free

    def taken(count: int, length: int) -> int:
        return Slab.nbytes(*slab_shape(c, count, length, chunk), itemsize)

    def most_slots() -> int:
        return largest(count, lambda n: taken(n, length) <= room)

    def longest() -> int:
        return chunk * largest(length // chunk, lambda n: taken(count, n * chunk) <= room)

    if slots is None:
        count = max(1, most_slots())
    if max_len is None and taken(count, length) > room:
        length = max(chunk, longest())
    slab = readable(taken(count, length))
    if taken(count, length) > room:
        ways = [f"{flag} {n}" for flag, n in (("--slots", most_slots()), ("--max-len", longest())) if n]
        raise ValueError(
            f"{count} slots of {length:,} tokens take {slab}, but {readable(max(0, free))} are free; "
            f"{' or '.join(ways) or 'nothing smaller'} would fit"
        )
    free = "" if free is None else f"; {readable(free)} of memory are free"
    layers, many = f"{c.layers} layer{'s' * (c.layers > 1)}", f"{count} slot{'s' * (count > 1)}"
    summary = f"{c.model_type}, {layers}; {many} of {length:,} tokens in a slab of {slab}{free}"
    return Sizes(count, length, chunk, budget or count + chunk * (2 + count // 8) // 2, summary)


def fit_all(model: Model, *sizes: int | None) -> Sizes:
    """What fits beside a model that is loaded. Of several ranks all have the same, so it is the least that fits one."""
    ranks, c, itemsize = model.ranks, model.config, model.dtype.size
    own = fit(c, itemsize, device.free_memory(), *sizes)
    if ranks.size == 1:
        return own
    check_alike(model)
    slots, max_len, chunk, budget = ranks.least(*own[:4])
    return fit(c, itemsize, None, slots, max_len, chunk, budget)


def check_alike(model: Model) -> None:
    """Have all ranks the same program and model? Else they would add up nonsense, and MLX would not complain."""
    here = Path(__file__).parent
    sources = [zlib.crc32(path.read_bytes()) for path in (here.parent / "nanobatch.py", *sorted(here.glob("*.py")))]
    alike = {
        "version of nanobatch and MLX": (mx.__version__, sources),
        "model and dtype": (replace(model.config, H=0, Hkv=0, hidden=0), str(model.dtype)),
        "weights": model.norm.tolist(),  # another training has changed these, too, if not every one
    }
    for what, own in alike.items():
        marks = model.ranks.gather(zlib.crc32(repr(own).encode()) // 2)
        if len({mark for (mark,) in marks}) > 1:
            raise ModelError(f"rank {model.ranks.rank}: the ranks have not the same {what}; give all of them one.")


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `limit` that fits, 0 if not even 1 does. Everything smaller than what fits, fits."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def slab_shape(c: Config, slots: int, max_len: int, chunk: int) -> tuple[int, int, int, int, int]:
    """Arguments for `Slab`. A slot is a whole number of chunks long: more than the padding of the last one needs."""
    return c.layers, slots, c.Hkv, -(-max_len // chunk) * chunk, c.Dh


def far_position(c: Config) -> int:
    """The position at which looking back on all before costs a token as much as everything else in a layer does.

    Measured on CPUs, with heads of 32 to 64: for one query head to look at one row (the score, its share of the
    softmax, the value added up) costs as much as 300 multiplications by weights. On a GPU it has not been measured:
    there chunks stay as wide as they are.
    """
    weights = c.D * c.Dh * 2 * (c.H + c.Hkv) + 3 * c.D * c.hidden * c.taken
    return sys.maxsize if has_gpu() else max(1, weights // (300 * c.H))


def is_exact(model: Model) -> bool:
    """Do a request's logits have the same bits in any company?

    Our own product sees to that for float32 numbers on a CPU, if each process that shares the model has it. (Each may
    have it in a form of its own, since what a process adds to a sum is the same in any company.) Nobody has shown it
    for packed weights and for half precision.
    """
    marks = model.ranks.gather(device.is_exact() and model.is_float32)
    return all(mark == [True] for mark in marks)
