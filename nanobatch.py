"""A serving engine for Llama models: the forward pass, the engine around it, and a plain command line.

The problem. A language model answers one token at a time, and for each token the machine reads every weight it has.
That reading is what takes the time, and it costs almost the same for eight sequences as for one. So whoever serves
many people wants many sequences in every step: that is batching. This file holds the step.

    prompt -> submit -> plan (sched.py) -> run: forward over the slab (kv.py), sample -> commit -> text
              any thread                  one thread at a time                                   any thread

Read it in this order: the forward pass below (one page, everything a Llama does), then `kv.py` (where keys and values
live), `sched.py` (who runs next), and back here for `Engine.step`, which ties them together: plan -> run -> commit.
Then, as you like: `sampling.py` (how a token is chosen), `text.py` (tokens to text), `checkpoint.py` (what is in a
model folder, and what can be wrong with it), `blas.py` (why MLX is fast on a Linux CPU here).

The glossary, used everywhere in this project:

    N    tokens in one forward pass                   D    model width
    B    rows: sequences in one window of it          H    query heads
    L    new tokens of each row                       Hkv  key and value heads; G = H / Hkv queries share one
    S    length of a slot of the slab                 Dh   size of one head
    T    how far attention reads (`reach`)            C    width of a prefill chunk
    V    vocabulary

    slot     a sequence's place in the slab: S places for a token's key and value
    row      in a forward pass, one of the B sequences; in a slot, one of the S places
    window   what a chunk, or all decoding rows, write into the slab and read from it
    prefill  the prompt goes into the slot, in chunks
    decode   one new token for a sequence
    ghost    a member of a step that was planned before anybody knew that its request had ended: it runs, and is dropped

The invariant: what a request is answered depends on its prompt, its `Sampling` and the model. Not on its neighbours,
its slot, or the moment it came.
"""

from __future__ import annotations

import argparse
import atexit
import math
import os
import sys
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import NamedTuple

import blas
import checkpoint
from blas import mx
from checkpoint import Config, ModelError, Rope, Weights
from kv import BUCKET, Slab, Window
from sampling import PENALTY_CONTEXT, Logprobs, Pick, Sampling, choose, fresh_seed
from sched import PADDING, Chunk, Decode, Plan, QueueFull, Request, Scheduler
from text import Text, printable

__all__ = ["Engine", "Handle", "Model", "ModelError", "QueueFull", "Result", "Sampling", "Snapshot", "forward"]


# --- the forward pass --------------------------------------------------------------------------------------------


def forward(
    model: Model, ids: Sequence[mx.array], windows: Sequence[Window], asked: Sequence[bool] = ()
) -> list[mx.array]:  # for each window its token ids -> its hidden states (tokens, D)
    """Everything a Llama does, for the chunks of prompts and the decoding rows that share this pass.

    Each chunk, and all decoding rows together, look at the slab through a window: B = 1 and L = C there, L = 1 here.
    Their tokens lie side by side, N in all, since norms, projections and the MLP treat each token by itself, and so
    the weights are read once for everybody. Only attention asks whose a token is.

    Nothing is computed here. MLX is lazy: each line adds nodes to a graph, and `Engine._run` starts the whole of it
    at once. What nobody asks for is never computed: a chunk that emits nothing, not `asked`, is in the last layer only
    for its keys and values.

    A layer with small numbers. Two rows decode, and that is all (B = 2, L = 1, N = 2); D = 8, H = 4 heads of Dh = 2,
    Hkv = 2 of them have keys and values, and attention looks back on T = 6 rows of the slab:

        x (2,8) - norm - qkv (2,16) -+- q (2,4,1,2) - turn - folded (2,2,2,2) -+- scores (2,2,2,6) - softmax -+
            |                        +- k (2,2,1,2) - turn - slab - keys (2,2,6,2)                            |
            |                        +- v (2,2,1,2) -------- slab - values (2,2,6,2) -------------------------+
            + <--------------------------------- o (2,8) <- heads side by side (2,8) <- sums of values -------+
            |
            +- norm - gate, up (2,hidden) each - silu(gate) * up - down (2,8)
            + <-------------------------------------------------------+
    """
    c = model.config
    sizes = [array.size for array in ids]  # N is their sum
    angles = [rope_angles(model, window) for window in windows]
    masks = [window.mask_for(c.H // c.Hkv) for window in windows]
    x = model.table.rows(ids[0] if len(ids) == 1 else mx.concatenate([array.flatten() for array in ids]))  # (N, D)
    for index, layer in enumerate(model.layers):
        # Attention: every token asks (q) all tokens up to itself what they have to say (k: to whom, v: what).
        qkv = layer.qkv(rms_norm(x, layer.attn_norm, c.norm_eps))  # (N, (H + 2 Hkv) * Dh)
        asking = []
        for own, window, turn, mask in zip(cut(qkv, sizes), windows, angles, masks, strict=True):
            q, k, v = heads(c, layer, own, window, turn)
            window.write(index, k, v)  # all windows write before the first one reads
            asking.append((q, window, mask))
        if index == c.layers - 1 and any(asked) and not all(asked):
            x = mx.concatenate(list(compress(cut(x, sizes), asked)))
            sizes, asking = list(compress(sizes, asked)), compress(asking, asked)
        sums = [attention(q, *window.read(index), mask).reshape(-1, c.H * c.Dh) for q, window, mask in asking]
        x = x + layer.o(mx.concatenate(sums).reshape(*x.shape[:-1], -1))
        # The MLP: each token by itself.
        h = rms_norm(x, layer.mlp_norm, c.norm_eps)
        gate, up = mx.split(layer.gate_up(h), 2, axis=-1)  # (N, hidden) each
        x = x + layer.down(silu(gate) * up)
    return cut(rms_norm(x, model.norm, c.norm_eps).reshape(-1, c.D), sizes)


def cut(x: mx.array, sizes: Sequence[int]) -> list[mx.array]:  # (N, ...) -> (size, ...) each
    return mx.split(x, list(accumulate(sizes))[:-1]) if len(sizes) > 1 else [x]


def heads(
    c: Config, layer: Layer, qkv: mx.array, window: Window, turn: tuple[mx.array, mx.array]
) -> tuple[mx.array, mx.array, mx.array]:  # (B * L, (H + 2 Hkv) * Dh) -> (B, H, L, Dh), twice (B, Hkv, L, Dh)
    """A window's queries, keys and values, head by head, queries and keys turned by their positions."""
    qkv = qkv.reshape(window.B, window.L, c.H + 2 * c.Hkv, c.Dh).transpose(0, 2, 1, 3)  # (B, H + 2 Hkv, L, Dh)
    qk, v = mx.split(qkv, [c.H + c.Hkv], axis=1)
    if c.qk_norm:
        q, k = mx.split(qk, [c.H], axis=1)
        q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
        qk = mx.concatenate([q, k], axis=1)
    q, k = mx.split(rotate(qk, *turn), [c.H], axis=1)  # q and k turn alike: one operation for both
    return q, k, v


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:  # (..., D) -> (..., D)
    """x / sqrt(mean(x^2) + eps) * weight"""
    return mx.fast.rms_norm(x, weight, eps)


def silu(x: mx.array) -> mx.array:
    """x / (1 + e^-x): nearly 0 below 0, nearly x above.

    On a CPU MLX takes 8 ns for a power and 20 for an `exp`, and together with `softmax` these were a tenth of a step.
    (Half precision holds e to three digits only: not there.)
    """
    if x.dtype != mx.float32:
        return x * mx.sigmoid(x)
    return x / (mx.power(math.exp(-1), x) + 1)


def softmax(x: mx.array) -> mx.array:  # (..., T) -> (..., T), which sum up to 1
    """e^x / sum(e^x). The same if all are made smaller first: so no power is too large for a float.

    In five operations here; each has a price of its own, so where there are few numbers MLX's one operation is faster.
    (Few by the shape without T, which grows with the neighbours: the choice must not, or the bits would.)
    """
    if x.dtype != mx.float32 or math.prod(x.shape[:-1]) < 16:
        return mx.softmax(x, axis=-1)
    powers = mx.power(math.e, x - mx.max(x, axis=-1, keepdims=True))
    return powers / mx.sum(powers, axis=-1, keepdims=True)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:  # (B, heads, L, Dh) -> the same
    """Rotary positions: number i and number i + Dh/2 of a head are one point in a plane, turned by its position.

    Two turned vectors' dot product depends on the difference of their angles alone, so attention sees how far apart
    two tokens are, and never where they stand. (a, b) becomes (a cos - b sin, b cos + a sin); the minus is in `sin`.
    """
    a, b = mx.split(x, 2, axis=-1)
    return (x * cos + mx.concatenate([b, a], axis=-1) * sin).astype(x.dtype)


def attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
    """softmax(q k^T + mask) v     q (B, H, L, Dh), k and v (B, Hkv, T, Dh) -> (B, L, H, Dh)

    Where is the 1 / sqrt(Dh) of the papers? In `rope_angles`, half of it with each of q and k: so it is free.

    G = H / Hkv query heads share a key head. They stand next to each other, so they fold into the rows of one
    matrix product, and each key is read once for all of them.
    """
    B, H, L, Dh = q.shape
    folded = q.reshape(B, k.shape[1], -1, Dh)  # (B, Hkv, G * L, Dh)
    weights = softmax(folded @ k.swapaxes(-1, -2) + mask).astype(v.dtype)  # (B, Hkv, G * L, T)
    return (weights @ v).reshape(B, H, L, Dh).transpose(0, 2, 1, 3)


def rope_angles(model: Model, window: Window) -> tuple[mx.array, mx.array]:  # (B, 1, L, Dh) each
    """cos and sin of each row's positions times each plane's frequency, once for both numbers that are turned in it."""
    rope, Dh = model.config.rope, model.config.Dh
    frequencies = model.frequencies  # (Dh/2,)
    if rope.type == "dynamic" and max(window.lengths) > rope.original_length:
        frequencies = mx.stack([rope_frequencies(rope, Dh, n) for n in window.lengths])[:, None]  # (B, 1, Dh/2)
    positions = window.positions * (1 / rope.factor if rope.type == "linear" else 1.0)  # (B, L)
    angles = (positions[:, :, None] * frequencies)[:, None]  # (B, 1, L, Dh/2)
    # What is turned becomes Dh^1/4 times shorter in the same go: attention wants the product of q and k / sqrt(Dh).
    cos, sin = mx.cos(angles) * Dh**-0.25, mx.sin(angles) * Dh**-0.25
    return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


def rope_frequencies(rope: Rope, Dh: int, length: int = 0) -> mx.array:  # (Dh/2,)
    """How far each of a head's Dh/2 planes turns from one position to the next.

    Plane i turns by theta ** (-2 i / Dh): the first by 1, so it tells neighbours apart, the last by nearly 1 / theta,
    so it takes tens of thousands of positions for one turn, and tells far from near.

    A model is stretched beyond the length it was trained for by turning its planes more slowly. `linear` slows all of
    them (in `rope_angles`, by dividing the positions). `llama3` slows the slow ones only, because the fast ones tell
    neighbours apart. `dynamic` raises theta with the length of the sequence: a prompt's own length for all of its
    tokens, then each new token's. So the same token at the same place turns differently in a longer prompt.
    """
    theta = rope.theta
    if rope.type == "dynamic" and length > rope.original_length:
        theta *= (rope.factor * length / rope.original_length - (rope.factor - 1)) ** (Dh / (Dh - 2))
    if rope.type != "llama3":
        return mx.exp(mx.arange(0, -(Dh // 2), -1) * (math.log(theta) / (Dh // 2)))  # theta ** (-2 i / Dh)
    periods = theta ** (mx.arange(0, Dh, 2) / Dh)  # positions for one radian
    turns = rope.original_length / (2 * mx.pi * periods)  # full turns within the trained length
    # Fewer turns than low_freq_factor: slowed by the whole factor. More than high_freq_factor: not at all.
    # In between, the frequency is a mixture of the two, here written for its reciprocal as mlx-lm computes it.
    keep = mx.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return 1 / (periods / ((1 - keep) / rope.factor + keep))


class Part(NamedTuple):
    """What a chunk, or all the decoding rows, put into a forward pass, and want from it."""

    ids: mx.array  # (1, C) or (B,)
    window: Window
    rows: slice  # those of its tokens whose logits are wanted
    members: list[tuple[Chunk | Decode, int]]  # each with its row of these logits; none if the chunk emits nothing


def keeps_bits(model: Model, slots: int, chunk: int, budget: int) -> bool:
    """Are a row's numbers in a product the same, bit by bit, whatever else goes through the weights with it?

    Then all that a step does can be one pass. MKL keeps them from four rows on, OpenBLAS does not. But rather than
    believe it, try it: each of a layer's matrices, on what may stand alone, on pairs, and on the most a step can hold.
    """
    if has_gpu() or "mkl" not in blas.name:
        return False
    layer, c = model.layers[0], model.config
    for dense, inputs in ((layer.qkv, c.D), (layer.o, c.H * c.Dh), (layer.gate_up, c.D), (layer.down, c.hidden)):
        x = mx.random.normal((max(budget, chunk) + slots, inputs), model.dtype, key=mx.random.key(0))
        whole = dense(x)
        alone = [dense(x[:slots]), dense(x[None, :PADDING])[0], dense(x[None, :chunk])[0]]
        for part in (*alone, dense(x[: slots + PADDING]), dense(x[: slots + chunk])):
            if not mx.array_equal(part, whole[: part.shape[0]]).item():
                return False
    return True


# --- the model: weights, in the shape that the forward pass wants them ---------------------------------------------


class Dense(NamedTuple):
    """y = x W + b, with W stored (in, out): over the checkpoint's (out, in), one row's x @ W.T takes twice as long.

    Unless the BLAS takes that order faster (`blas.takes_rows`): then W is a view of what the checkpoint has.

    Else W is widened with zeros to a multiple of 16 columns. A BLAS computes columns and rows in blocks, and where
    neither comes out even, OpenBLAS adds the last rows' numbers up in another order: a slot's bits would depend on its
    number. And to no multiple of 1,024: rows that lie a multiple of 4 KiB apart compete for the same few places in the
    processor's cache. With 49,168 columns instead of 49,152, the head of a 135M model took 11 ms instead of 40 (MKL).
    """

    weight: mx.array  # (in, out and a few more)
    bias: mx.array | None  # (out,)
    out: int

    def __call__(self, x: mx.array) -> mx.array:  # (..., in) -> (..., out)
        y = product(x, self.weight)
        if y.shape[-1] != self.out:
            y = y[..., : self.out]
        return y if self.bias is None else y + self.bias

    @staticmethod
    def of(parts: list[tuple[mx.array, mx.array | None]]) -> Dense:
        """From the checkpoint's weights (out, in) and biases: one matrix that yields all their outputs side by side.

        So the input is read once, and one product runs instead of three.
        """
        weight = mx.concatenate([weight for weight, _ in parts]) if len(parts) > 1 else parts[0][0]
        out, bias = weight.shape[0], None
        if any(b is not None for _, b in parts):
            bias = mx.concatenate([mx.zeros(w.shape[0], w.dtype) if b is None else b for w, b in parts])
        if blas.takes_rows(*weight.shape):
            return Dense(weight.T, bias, out)
        more = -out % 16
        if (out + more) % 1024 == 0:
            more += 16
        return Dense(mx.contiguous(mx.pad(weight, [(0, more), (0, 0)]).T), bias, out)

    def rows(self, ids: mx.array) -> mx.array:  # (...) -> (..., in)
        """As an embedding: column `id` of the (D, V) matrix, so that a tied head and its table are one array."""
        return mx.moveaxis(mx.take(self.weight, ids, axis=1), 0, -1)


def product(x: mx.array, weight: mx.array) -> mx.array:  # (B, ..., in) -> (B, ..., out)
    """x @ weight, in blocks of rows where the BLAS asks for it (`blas.rows_at_once`)."""
    B, block = x.shape[0], blas.rows_at_once(x.shape[0], weight.shape[-1])
    if block == B:
        return x @ weight
    x = mx.pad(x, [(0, -B % block), *[(0, 0)] * (x.ndim - 1)])
    return mx.concatenate([x[row : row + block] @ weight for row in range(0, B, block)])[:B]


class Quantized(NamedTuple):
    """The same with W packed: `bits` bits a number, and a scale and an offset for every `group` of them."""

    weight: mx.array  # (out, in * bits / 32), uint32
    scales: mx.array  # (out, in / group)
    offsets: mx.array
    bias: mx.array | None
    bits: int
    group: int

    def __call__(self, x: mx.array) -> mx.array:  # (..., in) -> (..., out)
        y = mx.quantized_matmul(
            x, self.weight, self.scales, self.offsets, transpose=True, group_size=self.group, bits=self.bits
        )
        return y if self.bias is None else y + self.bias

    def rows(self, ids: mx.array) -> mx.array:  # (...) -> (..., in)
        return mx.dequantize(
            self.weight[ids], self.scales[ids], self.offsets[ids], group_size=self.group, bits=self.bits
        )


class SideBySide(NamedTuple):
    """Projections of one input that cannot be fused, because they are quantized, perhaps each in a way of its own."""

    parts: tuple[Quantized | Dense, ...]

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([part(x) for part in self.parts], axis=-1)


class Layer(NamedTuple):
    attn_norm: mx.array  # (D,)
    qkv: Dense | SideBySide  # D -> (H + 2 Hkv) * Dh
    q_norm: mx.array | None  # (Dh,), qwen3 alone
    k_norm: mx.array | None
    o: Dense | Quantized  # H * Dh -> D
    mlp_norm: mx.array
    gate_up: Dense | SideBySide  # D -> 2 * hidden
    down: Dense | Quantized  # hidden -> D


@dataclass(frozen=True)
class Model:
    """A config and its weights, ready for `forward`."""

    config: Config
    layers: list[Layer]
    norm: mx.array  # (D,)
    table: Dense | Quantized  # the embedding, as a projection D -> V
    head: Dense | Quantized  # D -> V; the table itself where the checkpoint ties them
    frequencies: mx.array  # (Dh/2,)

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.dtype

    @staticmethod
    def load(folder: Path, dtype: str = "auto") -> Model:
        return ModelReader(folder, dtype).read()


def has_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def free_memory() -> int | None:
    """Bytes that can still be taken, or None if nobody knows. MLX does not raise when memory runs out: it crashes."""
    if has_gpu():  # of an Apple GPU or a CUDA card, MLX knows the whole and what it has taken itself
        info = mx.device_info()
        whole = info.get("max_recommended_working_set_size") or info.get("memory_size")
        return whole and int(whole) - mx.get_active_memory()
    if sys.platform != "linux":
        return None
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # a container's own limit, where there is one
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def size(nbytes: float) -> str:
    """12345678 -> '11.8 MiB'"""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


class ModelReader:
    """Takes a checkpoint's tensors one by one and gives them the shape that `forward` wants.

    `dtype` is "float32", "checkpoint" (as the files have it), or "auto": float32 on a CPU, else the files'. On a CPU
    only float32 matrix products are fast, the others are 10 to 50 times slower; quantized ones become float32, too.
    Names, shapes and memory are checked at once; nothing is read before `read`.
    """

    def __init__(self, folder: Path, dtype: str = "auto"):
        if dtype not in ("auto", "float32", "checkpoint"):
            raise ValueError(f"dtype = {dtype!r}; choose auto, float32 or checkpoint")
        self.float32 = dtype == "float32" or (dtype == "auto" and not has_gpu())
        self.weights = Weights(folder)
        self.config = checkpoint.read_config(folder, self.weights.has_head)
        self.weights.check_against(self.config)
        self.shapes = self.config.tensors()
        self.nbytes, free = self.weights.nbytes(self.config, self.float32), free_memory()
        if free is not None and self.nbytes > free:
            raise ModelError(
                f"{folder}: {size(self.nbytes)} of weights, but {size(free)} of memory are free; "
                "choose a smaller model."
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one number of the activations, and so of the slab."""
        return 4 if self.float32 else checkpoint.DTYPES[self.weights.entries["model.norm.weight"]["dtype"]].size

    def read(self) -> Model:
        c = self.config
        # One layer at a time, evaluated at once: else the files' copy and ours would stand in memory together.
        layers = [self.layer(f"model.layers.{i}.") for i in range(c.layers)]
        norm, table = self.vector("model.norm.weight"), self.linear("model.embed_tokens")
        head = table if c.tied else self.linear("lm_head")
        model = Model(c, layers, norm, table, head, rope_frequencies(c.rope, c.Dh))
        mx.eval(norm, table, head, model.frequencies)
        return model

    def layer(self, name: str) -> Layer:
        if _exiting.is_set():
            raise RuntimeError("the program is ending")
        norms = [f"{name}self_attn.{part}_norm.weight" for part in "qk"]
        q_norm, k_norm = [self.vector(norm) if self.config.qk_norm else None for norm in norms]
        layer = Layer(
            attn_norm=self.vector(f"{name}input_layernorm.weight"),
            qkv=self.linear(*(f"{name}self_attn.{part}_proj" for part in "qkv")),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self.linear(f"{name}self_attn.o_proj"),
            mlp_norm=self.vector(f"{name}post_attention_layernorm.weight"),
            gate_up=self.linear(f"{name}mlp.gate_proj", f"{name}mlp.up_proj"),
            down=self.linear(f"{name}mlp.down_proj"),
        )
        mx.eval(layer)
        return layer

    def vector(self, name: str) -> mx.array:
        vector = self.weights.take(name)
        return vector.astype(mx.float32) if self.float32 else vector

    def linear(self, *modules: str) -> Dense | Quantized | SideBySide:
        """One projection, or several of the same input as one."""
        parts = [self.part(module) for module in modules]
        if not any(isinstance(part, Quantized) for part in parts):
            return Dense.of(parts)
        parts = [part if isinstance(part, Quantized) else Dense.of([part]) for part in parts]
        return parts[0] if len(parts) == 1 else SideBySide(tuple(parts))

    def part(self, module: str) -> Quantized | tuple[mx.array, mx.array | None]:
        """A module as the checkpoint has it: quantized, or its weight (out, in) and bias."""
        has = self.weights.entries
        bias = self.vector(f"{module}.bias") if f"{module}.bias" in has else None
        weight = self.weights.take(f"{module}.weight")  # (out, in), or packed
        if f"{module}.scales" in has:
            scales, offsets = self.vector(f"{module}.scales"), self.vector(f"{module}.biases")
            bits, group = checkpoint.quantization(weight.shape, scales.shape, self.shapes[f"{module}.weight"][1])
            if not self.float32:
                return Quantized(weight, scales, offsets, bias, bits, group)
            weight = mx.dequantize(weight, scales, offsets, group_size=group, bits=bits)
        return (weight.astype(mx.float32) if self.float32 else weight), bias


# --- what is answered --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metrics:
    """Times in seconds. `itl` is the gap between a token and the next; None where there was no such thing."""

    queued_s: float | None
    ttft_s: float | None  # submit to first token
    tokens_per_s: float | None  # after the first
    itl_mean_s: float | None
    itl_p95_s: float | None
    itl_max_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class TokenLogprob(NamedTuple):
    """What the model thought of a token: its log probability, and the most likely tokens with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Result:
    text: str
    tokens: list[int]
    finish_reason: str  # "stop" | "length" | "cancelled" | "error"
    metrics: Metrics
    logprobs: list[TokenLogprob] | None
    error: str | None


Listener = Callable[["Handle", str], None]


class Handle:
    """One request as its owner sees it: iterate over it for text, or wait for its `result`. Any thread may."""

    def __init__(self, engine: Engine, request: Request, sampling: Sampling, listener: Listener | None):
        self.id, self.sampling = request.id, sampling
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.error: str | None = None
        self._engine, self._request, self._listener = engine, request, listener
        self._seed = fresh_seed() if sampling.seed is None else sampling.seed
        self._ends = sampling.stop_tokens | (frozenset() if sampling.ignore_eos else engine.text.end_tokens)
        self._text = engine.text.stream(sampling.stop_texts)
        self._pieces: list[str] = []
        self._times: list[float] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> str | None:
        return self._request.finish_reason

    def cancel(self) -> None:
        """End this request now, whatever it is doing. After its end, this does nothing."""
        self._engine._cancel(self._request)

    def __iter__(self) -> Iterator[str]:
        """The text as it comes, in pieces that never hold half a character."""
        seen = 0
        while True:
            self._engine._wait(lambda seen=seen: len(self._pieces) > seen or self.finish_reason is not None)
            if seen == len(self._pieces):
                return
            yield self._pieces[seen]
            seen += 1

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises TimeoutError if it does not come within `timeout` seconds."""
        if not self._engine._wait(lambda: self.finish_reason is not None, timeout):
            raise TimeoutError(f"request {self.id} has not ended within {timeout} s")
        logprobs = None if self.sampling.logprobs is None else list(self.logprobs)
        return Result(self.text, list(self.tokens), self.finish_reason, self.metrics, logprobs, self.error)

    @property
    def metrics(self) -> Metrics:
        r, times = self._request, self._times
        gaps = sorted(b - a for a, b in pairwise(times))
        return Metrics(
            queued_s=None if r.admitted is None else r.admitted - r.arrived,
            ttft_s=None if r.first_token is None else r.first_token - r.arrived,
            tokens_per_s=len(gaps) / (times[-1] - times[0]) if gaps and times[-1] > times[0] else None,
            itl_mean_s=sum(gaps) / len(gaps) if gaps else None,
            itl_p95_s=gaps[math.ceil(0.95 * len(gaps)) - 1] if gaps else None,
            itl_max_s=gaps[-1] if gaps else None,
            prompt_tokens=len(r.prompt),
            cached_tokens=r.reused,
            output_tokens=len(self.tokens),
        )

    def _accept(self, token: int, now: float, logprob: TokenLogprob | None) -> str | None:
        """Take a token from commit; says why the answer ends with it, or None."""
        if token < 0:
            self.error = "the model computed a number that is not finite"
            return "error"
        self._times.append(now)
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(TokenLogprob(logprob.logprob, logprob.top[: self.sampling.logprobs]))
        if token in self._ends:
            return "stop"
        self._show(self._text.push(token))
        return "stop" if self._text.stopped else None

    def _flush(self, tell: bool = True) -> None:
        """At the end: the text that was held back. The listener is told if it is a step that ends the answer."""
        ended_by_token = self.tokens and self.tokens[-1] in self._ends
        self._show(self._text.finish(self.tokens[:-1] if ended_by_token else self.tokens), tell)

    def _show(self, piece: str, tell: bool = True) -> None:
        if piece:
            self._pieces.append(piece)
            if tell and self._listener:
                self._listener(self, piece)


@dataclass(frozen=True)
class SlotView:
    """One slot at one moment."""

    slot: int
    phase: str  # "free" | "prefill" | "decode"
    request: int | None
    used: int  # rows in the slab
    prompt_tokens: int
    output_tokens: int
    reused: int  # rows that were taken over from another prompt
    remembered: int  # rows that a free slot still holds


@dataclass(frozen=True)
class StepView:
    """One step as it was run: who did what, and how long each stage took."""

    step: int
    admitted: tuple[tuple[int, int], ...]  # (slot, request)
    prefill: tuple[tuple[int, int, int, int], ...]  # (slot, request, start, stop): which piece of which prompt
    decode: tuple[tuple[int, int], ...]  # (slot, request)
    held: tuple[tuple[int, int], ...]  # (slot, request): in a slot, but without a chunk in this step
    ghosts: tuple[int, ...]  # slots whose request had ended before this step: their tokens were dropped
    waiting: int  # requests left in line
    policy: str  # the one that the step was planned under
    tokens: int  # that were delivered
    cost: int  # of the budget
    began: float  # on the engine's clock: planned
    ended: float  # committed
    plan_s: float
    # Building the graph and starting it. On a CPU MLX keeps few operations in its line, and whoever hands over the next
    # one waits: so nearly all of a step's work is waited for in here.
    build_s: float
    wait_s: float  # waiting for the device
    commit_s: float

    @staticmethod
    def of(plan: Plan, ghosts: tuple[int, ...], **times: float) -> StepView:
        """A plan in plain numbers, once it has been run."""
        return StepView(
            plan.step,
            admitted=tuple((r.slot, r.id) for r in plan.admitted),
            prefill=tuple((c.slot, c.request.id, c.start, c.stop) for c in plan.chunks),
            decode=tuple((d.slot, d.request.id) for d in plan.decodes),
            held=tuple((r.slot, r.id) for r in plan.held),
            ghosts=ghosts,
            waiting=plan.waiting,
            policy=plan.policy,
            tokens=len(plan.emitters) - len(ghosts),
            cost=len(plan.decodes) + sum(chunk.cost for chunk in plan.chunks),
            **times,
        )


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment, for whoever draws it. Immutable, and made of plain Python."""

    policy: str
    slots: tuple[SlotView, ...]
    queue: tuple[tuple[int, float], ...]  # (request, seconds waited), oldest first
    submitted: int
    finished: int
    output_tokens: int
    steps: tuple[StepView, ...]  # the most recent ones, oldest first


# --- the engine --------------------------------------------------------------------------------------------------

# One device, one stream, one thread at a time. MLX binds ordinary streams to the thread that made them; this one may
# be used from any thread, as long as a lock sees to it that there is one at a time. So an engine can be loaded in one
# thread, stepped in another, and no thread is left behind.
_device_lock = threading.RLock()
_stream: list[mx.Stream] = []
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_exiting = threading.Event()


def device_stream() -> mx.StreamContext:
    """`with _device_lock, device_stream():` stands around everything that touches an `mx.array`.

    subtle: two context managers written in C, not one made of a generator. Ctrl-C comes between two lines of Python,
    so also in a generator that is about to release the lock, and the lock would stay held for good.
    """
    if not _stream:
        _stream.append(mx.new_thread_unsafe_stream(mx.default_device()))
    return mx.stream(_stream[0])


@atexit.register
def _leave() -> None:
    """A process that exits while the device is working hangs or aborts, so nobody may forget to close."""
    _exiting.set()  # whoever is loading a model gives up at the next layer
    for engine in list(_engines):
        engine.close()
    _device_lock.acquire()  # and never released: nobody starts anything any more
    if _stream:
        mx.synchronize(_stream[0])


@dataclass
class Flight:
    """A step that has been started, and whose tokens have not been read yet."""

    plan: Plan
    tokens: mx.array  # (slots,): what each emitter's slot sampled, -1 where its logits were not finite
    logprobs: list[Logprobs]
    began: float
    plan_s: float
    build_s: float
    wait_s: float


class Engine:
    """The forward pass, the slab and the scheduler, tied together. `step` is the heart.

    `slots` sequences run at once, each at most `max_len` tokens long, prompt and answer together; where they are not
    given they are chosen to fit the memory that is free, and `summary` says what was chosen. `chunk` is the width of a
    prefill chunk (less where it looks back far: `Scheduler._widest`), `budget` what one step may cost, in tokens: by
    default one for each slot, two chunks, and another chunk for every eight slots, because the more there are, the
    more of them fall free at a time. `exact` keeps the device's shapes constant, so that a request has the same bits in
    any company; without, idle rows are left out. `reuse` lets prompts that begin alike share rows. `run_ahead` starts a
    step before the one before has been read.
    """

    def __init__(
        self,
        model: Model,
        text: Text,
        *,
        slots: int | None = None,
        max_len: int | None = None,
        policy: str = "continuous",
        chunk: int = 64,
        budget: int | None = None,
        max_queue: int = 10_000,
        exact: bool = True,
        reuse: bool = True,
        run_ahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        for name, value in (("budget", budget), ("max_queue", max_queue)):
            check_count(name, value)
        self.model, self.text, self.exact, self.run_ahead, self.clock = model, text, exact, run_ahead, clock
        slots, max_len, self.summary = fit(model.config, model.dtype.size, free_memory(), slots, max_len, chunk)
        budget = slots + chunk * (2 + slots // 8) if budget is None else budget
        self.sched = Scheduler(
            slots,
            max_len,
            chunk=chunk,
            budget=budget,
            far=far_position(model.config),
            policy=policy,
            max_queue=max_queue,
            reuse=reuse,
        )
        self._handles: dict[int, Handle] = {}
        self._steps: deque[StepView] = deque(maxlen=256)
        self._output_tokens = self._next_id = 0
        self._state = threading.Condition()  # guards everything that is not an array; whoever waits sleeps on it
        self._thread: threading.Thread | None = None
        self._stopping = self._closed = False
        self._reset_device()
        with _device_lock, device_stream():
            self.one_pass = not exact or keeps_bits(model, slots, chunk, budget)
        _engines.add(self)

    @classmethod
    def load(
        cls, model: str | Path = "demo", *, dtype: str = "auto", report: Callable[[str], None] | None = None, **options
    ) -> Engine:
        """An engine for a folder, a hub id, or "demo". Options are those of `Engine`; `report` is told what is done."""
        report = report or (lambda stage: None)
        report(f"finding {model}")
        folder = checkpoint.find(str(model))
        with _device_lock, device_stream():
            reader = ModelReader(folder, dtype)
            text = Text(folder, reader.config.V)
            free = free_memory()  # a slab that will not fit is refused now, not when the weights have been read
            room = None if free is None else free - reader.nbytes
            sizes = (options.get(name) for name in ("slots", "max_len", "chunk"))
            *_, slab = fit(reader.config, reader.itemsize, room, *sizes)
            report(f"reading {size(reader.nbytes)} of weights from {folder.name}")
            weights = reader.read()
        report(f"allocating the slab: {slab}")
        return cls(weights, text, **options)

    def _reset_device(self) -> None:
        """A new slab, and nothing in flight."""
        with _device_lock, device_stream():
            self._flight: Flight | None = None
            self._started: tuple[mx.array, ...] = ()  # what the last forward pass to be started yields
            self._waited = 0.0
            self._dirty: dict[int, tuple[int, int]] = {}  # slot -> rows that may hold numbers that are not finite
            self.slab: Slab | None = None  # let the old one go before a new one is made
            sizes = slab_sizes(self.model.config, len(self.sched.owners), self.sched.max_len, self.sched.chunk)
            self.slab = Slab(*sizes, self.model.dtype)
            slots = self.slab.slots
            self._newest = mx.zeros(slots, mx.int32)  # (slots,): each slot's newest token, on the device
            # (slots, 20): the tokens before it, for those whose repetitions are penalised; V stands for none
            self._history = mx.full((slots, PENALTY_CONTEXT), self.model.config.V, mx.int32)

    # --- plan -> run -> commit

    def step(self) -> bool:
        """One turn of the wheel. False if there was nothing to do.

        With run-ahead, step N+1 is started before N's tokens are read: what N sampled goes into N+1 on the device,
        and Python's work hides behind the device's. Without, the same three lines run in their plain order.

            device   |   run N             |   run N+1           |   run N+2
            Python   plan, build N+1 ------> commit N, plan, build N+2 ------> commit N+1 ...
                                           ^ N's tokens are read here, and N+1 already runs

        What goes wrong ends as few as possible. A token that is not finite, a listener or a tokenizer that raises ends
        its own request (`_accept`). A step that raises ends those who were in it (`_fail`), or in one that had been
        started after it: the others prefill again.
        Ctrl-C, or a device that gives no new slab, ends all (`_abandon`), and still the engine can be used.
        """
        plan = flight = None
        with _device_lock, device_stream():
            try:
                if self.slab is None:  # after a failure there was not enough memory for a new one: try again
                    self._reset_device()
                began = self.clock()
                plan, scrubs = self._plan(began)
                flight = self._run(plan, scrubs, began) if plan else None
                if self.run_ahead:
                    flight, self._flight = self._flight, flight  # commit the one before; the new one stays in flight
                if flight:
                    self._commit(flight)
            except BaseException as error:
                self._recover(plan, flight, error)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C is for the whole program
                return True
        return bool(plan or flight)

    def _plan(self, now: float) -> tuple[Plan | None, list[tuple[int, int, int]]]:
        """The scheduler's plan, and the rows to scrub (slot, start, stop) before it runs."""
        with self._state:
            plan = self.sched.plan(now)
            slots = [request.slot for request in plan.admitted] if plan else []
            return plan, [(slot, *self._dirty.pop(slot)) for slot in slots if slot in self._dirty]

    def _run(self, plan: Plan, scrubs: Iterable[tuple[int, int, int]], began: float) -> Flight:
        """Turn a plan into one lazy graph, sampling included, and start it."""
        run_began, self._waited = self.clock(), 0.0
        chosen = []
        for rows in scrubs:
            self.slab.scrub(*rows)
        for parts in self._passes(plan):
            ids, windows, asked = zip(*[(part.ids, part.window, bool(part.members)) for part in parts], strict=True)
            states = forward(self.model, ids, windows, asked)
            if not any(asked):
                self._start(*self.slab.written())  # nobody asks for x, so the rest of its last layer is never run
                continue
            self._start(*states)
            for x, part in zip(states, compress(parts, asked), strict=True):
                chosen.append(self._choose(self.model.head(x[part.rows]), part.members))
        emitted = mx.full(self.slab.slots, -1, mx.int32)
        logprobs = []
        for slots, tokens, measured in chosen:
            emitted[slots] = tokens
            logprobs += measured
        if chosen:
            self._newest = mx.where(emitted >= 0, emitted, self._newest)
        mx.async_eval(emitted, self._newest, self._history, logprobs)
        build_s = self.clock() - run_began - self._waited
        return Flight(plan, emitted, logprobs, began, run_began - began, build_s, self._waited)

    def _start(self, *results: mx.array) -> None:
        """Start a forward pass, as soon as the one before has read the last of the slab.

        subtle: an array is written in place only if nothing else holds its memory, and a pass that has been started
        holds all that it has yet to read. Start the next one too early, and it copies the slab, layer by layer: with
        two layers of 75 MB, a step took 82 ms instead of 12. So wait for the pass before. What remains to be done for
        it, the head and the sampling, is time enough to get the next one going: the device does not stand still.
        """
        began = self.clock()
        mx.eval(self._started)
        self._started = ()  # these may be views of the slab: let go of it before it is to be written
        self._waited += self.clock() - began
        mx.async_eval(results)
        self._started = results

    def _passes(self, plan: Plan) -> Iterator[list[Part]]:
        """The plan's chunks and its decoding rows, those together that go through the weights in one forward pass.

        All of them, if that changes no bit (`keeps_bits`) or nobody minds: eight users of the 15M shape, with prompts
        of 128 tokens, are served in 11 % less time. Who takes over another slot's rows begins a pass, since one before
        it may be writing them.
        """
        parts: list[Part] = []
        for chunk in plan.chunks:
            if parts and (chunk.source is not None or not self.one_pass):
                yield parts
                parts = []
            parts.append(self._prefill(chunk))
        if parts and plan.decodes and not self.one_pass:
            yield parts
            parts = []
        if plan.decodes:
            parts.append(self._decode(plan.decodes))
        if parts:
            yield parts

    def _prefill(self, chunk: Chunk) -> Part:
        """One chunk of a prompt, padded to C tokens. C depends on the prompt and the place: any company has this shape.

        The padding's keys land in rows that the sequence has yet to reach, and it overwrites them when it does.
        """
        C, prompt = chunk.width, chunk.request.prompt
        if chunk.source is not None:
            prefix = self.slab.prefix(chunk.source, chunk.start)
            self._start(*prefix)
            self.slab.fill(chunk.slot, prefix)
        ids = [*prompt[chunk.start : chunk.stop], *[0] * (C - (chunk.stop - chunk.start))]
        reach = self.slab.reach(chunk.start + C)
        window = Window(self.slab, [chunk.slot], [chunk.start], C, reach, [len(prompt)])
        last = chunk.stop - chunk.start - 1
        return Part(mx.array([ids]), window, slice(last, last + 1), [(chunk, 0)] if chunk.emits else [])

    def _decode(self, members: Sequence[Decode]) -> Part:
        """One token for each member. Exact: every slot is a row, idle ones too, so that the shape never changes.

        A matrix product of another shape may add its numbers in another order, and rounding makes that show: compact
        rows give equal tokens, constant rows give equal bits. One shape does change with the company: how far
        attention reads. Past a row's own length that adds weights of exactly 0, and in whole buckets the numbers before
        are added in the same order (tests/test_exact.py counts the bits that differ, over random companies: none).
        """
        at = {member.slot: member.position for member in members}
        slots = list(range(self.slab.slots)) if self.exact else list(at)
        starts = [at.get(slot, self.slab.spare) for slot in slots]
        while not self.exact and len(slots) & (len(slots) - 1):  # compact: a power of two, so that shapes are few
            slots.append(slots[0])
            starts.append(self.slab.spare)
        lengths = [at.get(slot, 0) + 1 for slot in slots]
        window = Window(self.slab, slots, starts, 1, self.slab.reach(max(at.values()) + 1), lengths)
        ids = self._newest[mx.array(slots)]  # (B,): on the device, read by nobody yet
        return Part(ids, window, slice(None), [(member, slots.index(member.slot)) for member in members])

    def _pick(self, member: Chunk | Decode, row: int) -> Pick:
        """What the sampler needs to know of a member of this step: its token will be the request's index-th."""
        index = member.position - len(member.request.prompt) + 1 if isinstance(member, Decode) else 0
        handle = self._handles.get(member.request.id)  # gone if it was cancelled just now: then anything will do
        sampling, seed = (handle.sampling, handle._seed) if handle else (Sampling(), 0)
        if index == 0 and sampling.repetition_penalty != 1:
            recent = member.request.prompt[-PENALTY_CONTEXT:]
            none = [self.model.config.V] * (PENALTY_CONTEXT - len(recent))
            self._history[member.slot] = mx.array([*none, *recent])
        return Pick(row, member.slot, sampling, seed, index)

    def _choose(
        self, logits: mx.array, members: Sequence[tuple[Chunk | Decode, int]]
    ) -> tuple[mx.array, mx.array, list[Logprobs]]:
        """Choose from logits (B, V): the slots of the members, their tokens, and the log probabilities asked for."""
        picks = [self._pick(member, row) for member, row in members]
        tokens, measured = choose(logits, picks, self._history)
        penalised = [i for i, pick in enumerate(picks) if pick.sampling.repetition_penalty != 1]
        if penalised:
            which = mx.array([picks[i].slot for i in penalised])
            newest = mx.maximum(tokens[mx.array(penalised)], 0)[:, None]
            self._history[which] = mx.concatenate([self._history[which][:, 1:], newest], axis=1)
        return mx.array([pick.slot for pick in picks]), tokens, measured

    def _commit(self, flight: Flight) -> None:
        """Read what a step sampled, hand it to its owners, and let go of those who end."""
        began = self.clock()
        mx.eval(flight.tokens, flight.logprobs)  # the step is done: here, and in `_start`, Python asks to wait
        values, read = flight.tokens.tolist(), self.clock()
        measured = {slot: logprob for part in flight.logprobs for slot, logprob in read_logprobs(part)}
        members = flight.plan.emitters
        tokens = [values[member.slot] for member in members]
        logprobs = {member.request.id: measured.get(member.slot) for member in members}

        def accept(request: Request, token: int) -> str | None:
            return self._accept(request, token, logprobs[request.id])

        with self._state:
            ghosts = tuple(member.slot for member in members if member.request.finish_reason is not None)
            for request in self.sched.commit(flight.plan, tokens, accept, read):
                self._retire(request)
            self._record(flight, ghosts, began, read)
            self._state.notify_all()

    def _accept(self, request: Request, token: int, logprob: TokenLogprob | None) -> str | None:
        """Deliver one token. Whatever goes wrong here is this request's own failure."""
        handle = self._handles[request.id]
        self._output_tokens += 1
        try:
            reason = handle._accept(token, self.clock(), logprob)
            if reason == "stop" or request.committed == request.max_tokens:
                handle._flush()
            return reason
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in the tokenizer's Rust is no Exception, nor is a listener's sys.exit
            handle.error = describe(error)
            return "error"

    def _retire(self, request: Request) -> None:
        """Forget a request that has ended. Called under the lock, so before its slot can be given away.

        Rows of it may hold numbers that are not finite, and nobody has looked: after an error, all of them; before its
        first token, the prompt's; and the ghost's row, if a step that was planned before the end is still in flight.
        """
        self._handles.pop(request.id, None)
        if request.slot is None or not request.prefilled:
            return
        seen = len(request.prompt) + request.committed - 1  # rows that a finite token has vouched for
        if request.finish_reason == "error" or request.committed == 0:
            seen = 0
            self.sched.memory[request.slot] = None  # and nobody may take them over
        if seen == 0 or request.planned > request.committed:
            chunk = self.sched.chunk  # no chunk's padding reaches further
            self._dirty[request.slot] = seen, -(-(len(request.prompt) + request.planned) // chunk) * chunk

    def _record(self, flight: Flight, ghosts: tuple[int, ...], began: float, read: float) -> None:
        ended = self.clock()
        times = {"began": flight.began, "ended": ended, "plan_s": flight.plan_s, "build_s": flight.build_s}
        waited = flight.wait_s + read - began
        self._steps.append(StepView.of(flight.plan, ghosts, **times, wait_s=waited, commit_s=ended - read))

    def _recover(self, plan: Plan | None, flight: Flight | None, error: BaseException) -> None:
        """After an exception in a step: end as few as possible, and all if nothing can be trusted."""
        if not isinstance(error, Exception) or not (plan or flight):  # Ctrl-C at any line, or a fault of the scheduler
            self._abandon(error)
            return
        try:
            self._fail(plan, flight, error)
        except BaseException as worse:  # no memory for a new slab, or Ctrl-C now
            self._abandon(worse)
            raise

    def _fail(self, plan: Plan | None, flight: Flight | None, error: Exception) -> None:
        """A step raised. All who were in it, or in one already started after it, end with the error; others go on."""
        lost = [plan] if plan else []
        if flight is None and self._flight:  # the new step could not be built; the one before may be quite all right
            flight, self._flight = self._flight, None
            with suppress(Exception):
                self._commit(flight)
                flight = None
        lost += [f.plan for f in (flight, self._flight) if f]
        with self._state:
            for member in (member for plan in lost for member in (*plan.chunks, *plan.decodes)):
                self._end(member.request, "error", describe(error))
            self.sched.start_over()
        self._reset_device()

    def _abandon(self, error: BaseException | None) -> None:
        """End everything that is open: cancelled, or with an error. Right whatever state the scheduler is in."""
        with self._state:
            reason = "cancelled" if error is None else "error"
            self.sched.clear(reason, self.clock())
            for handle in self._handles.values():
                handle.error = None if error is None else describe(error)
                handle._request.finish_reason = handle._request.finish_reason or reason
            self._handles.clear()
            rows = slab_sizes(self.model.config, 1, self.sched.max_len, self.sched.chunk)[3]
            self._dirty = dict.fromkeys(range(len(self.sched.owners)), (0, rows))
            self._flight = None
            self._state.notify_all()

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request from outside a step, in whatever thread: so its listener is not called."""
        with self._state:
            handle = self._handles.get(request.id)
            if handle is None:
                return
            try:
                handle.error = error
                with suppress(Exception):
                    handle._flush(tell=False)
                self.sched.finish(request, reason, self.clock())
                self._retire(request)
                self._state.notify_all()
            except BaseException as interrupt:  # Ctrl-C half way
                self._abandon(interrupt)
                raise

    # --- what everybody may call, from any thread

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping],
        sampling: Sampling | None = None,
        listener: Listener | None = None,
    ) -> Handle:
        """Put a prompt in line: a text, chat messages, or token ids as they are. Never blocks; QueueFull if it is full.

        `listener(handle, piece)` is called with each piece of text, by the thread that steps: it must not wait.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling is a {type(sampling).__name__}; give a Sampling")
        self._check_ids(sampling.token_ids())
        ids = self._ids(prompt)
        room = self.sched.max_len - len(ids)
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            if room < 1:
                raise ValueError(f"prompt of {len(ids)} tokens leaves no room in a slot of {self.sched.max_len}")
            max_tokens = room
        rope = self.model.config.rope
        with self._state:
            if self._closed:
                raise RuntimeError("the engine is closed; load another")
            request = Request(self._next_id, ids, max_tokens, self.clock())
            request.shares = rope.type != "dynamic" or len(ids) <= rope.original_length
            self._next_id += 1
            handle = Handle(self, request, sampling, listener)
            try:
                self._handles[request.id] = handle
                self.sched.submit(request)
            except Exception:  # it does not fit, or the line is full
                del self._handles[request.id]
                raise
            except BaseException as interrupt:  # Ctrl-C half way
                self._abandon(interrupt)
                raise
            self._state.notify_all()
        return handle

    def _ids(self, prompt: str | Sequence[int] | Sequence[Mapping]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token")
            prompt = self.text.encode(prompt)
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.text.encode_chat(prompt)
        elif (
            not isinstance(prompt, Sequence)
            or isinstance(prompt, (bytes, bytearray))
            or not all(type(token) is int for token in prompt)
        ):
            raise ValueError(f"a prompt is a text, chat messages or token ids, not {type(prompt).__name__} like this")
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token")
        self._check_ids((min(prompt), max(prompt)))
        return tuple(prompt)

    def _check_ids(self, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.model.config.V:  # MLX would read whatever lies there
                raise ValueError(f"token id {token} is outside the vocabulary of {self.model.config.V}")

    def generate(self, prompts: Sequence, sampling: Sampling | None = None) -> list[Result]:
        """All prompts at once; the results in the prompts' order."""
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                handles.append(self.submit(prompt, sampling))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:  # if one could not be submitted or waiting was interrupted; else this does nothing
                handle.cancel()

    def _cancel(self, request: Request) -> None:
        self._end(request, "cancelled")

    @contextmanager
    def serving(self) -> Iterator[Engine]:
        """Inside this block a thread steps the engine whenever there is work, and sleeps when there is none."""
        with self._state:
            if self._closed or self._thread:
                raise RuntimeError("the engine is closed" if self._closed else "the engine is serving already")
            self._stopping = False
            thread = threading.Thread(target=self._serve, name="nanobatch", daemon=True)
            thread.start()
            self._thread = thread
        try:
            yield self
        finally:
            self._stop_thread()

    def _serve(self) -> None:
        try:
            while True:
                with self._state:
                    self._state.wait_for(lambda: self._stopping or self._has_work())
                    if self._stopping:
                        return
                # What step lets through (not even a new slab could be made) has ended all there was. Go on: this
                # thread must not die while somebody may come and wait for it.
                with suppress(BaseException):
                    self.step()
        finally:
            with self._state:
                self._thread = None
                self._state.notify_all()

    def _has_work(self) -> bool:
        return bool(self.sched.waiting or self.sched.running or self._flight)

    def _stop_thread(self) -> None:
        with self._state:
            thread, self._stopping = self._thread, True
            self._state.notify_all()
        if thread and thread is not threading.current_thread():
            thread.join()

    def _wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until `ready()`: asleep while a thread serves, else by stepping the engine. False if time runs out."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with self._state:
                left = deadline - time.monotonic()
                if self._thread:
                    patience = min(left, threading.TIMEOUT_MAX)
                    self._state.wait_for(lambda: ready() or not self._thread, patience)
                if ready():
                    return True
                if left <= 0:
                    return False
            if not self._thread:
                self.step()

    def snapshot(self) -> Snapshot:
        """What the engine is doing now."""
        with self._state:
            now = self.clock()
            return Snapshot(
                policy=self.sched.policy,
                slots=tuple(self._slot_view(slot) for slot in range(len(self.sched.owners))),
                queue=tuple((r.id, now - r.arrived) for r in self.sched.waiting.values()),
                submitted=self.sched.submitted,
                finished=self.sched.finished,
                output_tokens=self._output_tokens,
                steps=tuple(self._steps),
            )

    def _slot_view(self, slot: int) -> SlotView:
        owner, memory = self.sched.owners[slot], self.sched.memory[slot]
        if owner is None:
            return SlotView(slot, "free", None, 0, 0, 0, 0, memory.prefilled if memory else 0)
        used = owner.prefilled + max(0, owner.committed - 1)  # the newest token's key and value are not there yet
        return SlotView(slot, owner.phase, owner.id, used, len(owner.prompt), owner.committed, owner.reused, 0)

    def check(self) -> None:
        """Assert the invariants of scheduler and slab. The tests do so after every step."""
        with self._state:
            self.sched.check()
            self.slab.check()
            assert self._handles.keys() == self.sched.running.keys() | self.sched.waiting.keys()

    def close(self) -> None:
        """End every open request as cancelled, and leave the device idle. Closing twice does nothing."""
        with self._state:
            self._closed = True
            for handle in list(self._handles.values()):
                handle.cancel()
        self._stop_thread()
        with _device_lock, device_stream():
            self._flight = None
            mx.synchronize(_stream[0])

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def check_count(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31):
        raise ValueError(f"{name} = {value!r}, but it must be a whole number of at least 1 and below 2^31")


def slab_sizes(c: Config, slots: int, max_len: int, chunk: int) -> tuple[int, int, int, int, int]:
    """Arguments for `Slab`. A slot is a whole number of chunks long: more than the padding of the last one needs."""
    return c.layers, slots, c.Hkv, -(-max_len // chunk) * chunk, c.Dh


def far_position(c: Config) -> int:
    """The position at which looking back on all before costs a token as much as everything else in a layer does.

    Measured on CPUs, with heads of 32 to 64: for one query head to look at one row (the score, its share of the
    softmax, the value added up) costs as much as 300 multiplications by weights. On a GPU nobody has measured it yet:
    there chunks stay as wide as they are.
    """
    weights = c.D * c.Dh * 2 * (c.H + c.Hkv) + 3 * c.D * c.hidden
    return sys.maxsize if has_gpu() else max(1, weights // (300 * c.H))


def fit(
    c: Config, itemsize: int, free: int | None, slots: int | None, max_len: int | None, chunk: int | None
) -> tuple[int, int, str]:
    """Slots, their length, and a line about them: as asked for, or chosen to fit the memory, or refused."""
    chunk = 64 if chunk is None else chunk
    for name, value in (("slots", slots), ("max_len", max_len), ("chunk", chunk)):
        check_count(name, value)
    if chunk % BUCKET:
        raise ValueError(f"chunk = {chunk}, but it must be a multiple of {BUCKET}")
    if c.window is not None and max_len is not None and max_len > c.window:
        raise ValueError(f"max_len = {max_len}, but this model's attention slides over {c.window}; choose less")
    some, length = slots or 8, max_len or min(1024, c.max_positions, c.window or 1024)
    room = math.inf if free is None else 0.9 * free

    def slab(some: int, length: int) -> int:
        return Slab.nbytes(*slab_sizes(c, some, length, chunk), itemsize)

    def fewer() -> int:
        return most(some, lambda n: slab(n, length) <= room)

    def shorter() -> int:
        return chunk * most(length // chunk, lambda n: slab(some, n * chunk) <= room)

    if slots is None:
        some = max(1, fewer())
    if max_len is None and slab(some, length) > room:
        length = max(chunk, shorter())
    if slab(some, length) > room:
        ways = [f"{flag} {most}" for flag, most in (("--slots", fewer()), ("--max-len", shorter())) if most]
        raise ValueError(
            f"{some} slots of {length:,} tokens take {size(slab(some, length))}, but {size(max(0, free))} are free; "
            f"{' or '.join(ways) or 'nothing smaller'} would fit"
        )
    line = (
        f"{c.model_type}, {c.layers} layers; {some} {'slot' if some == 1 else 'slots'} of {length:,} tokens in a slab "
        f"of {size(slab(some, length))}" + ("" if free is None else f"; {size(free)} of memory are free")
    )
    return some, length, line


def most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `limit` that fits, 0 if not even 1 does. Whatever is smaller than what fits, fits."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def read_logprobs(part: Logprobs) -> Iterator[tuple[int, TokenLogprob]]:
    """What the device measured for some slots, as plain numbers."""
    rows = zip(part.slots, part.chosen.tolist(), part.top_ids.tolist(), part.top.tolist(), strict=True)
    for slot, chosen, ids, values in rows:
        yield slot, TokenLogprob(chosen, tuple(zip(ids, values, strict=True)))


# --- the command line ----------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("nanobatch.py", description="Run prompts through a Llama model, all at once.")
    add = parser.add_argument
    add("--model", default="demo", help="a model folder, a hub id such as owner/name, or 'demo'")
    add("--prompt", action="append", help="what to answer; may be repeated; - reads standard input")
    add("--raw", action="store_true", help="take prompts as plain text, even if the model has a chat template")
    add("--max-tokens", type=int, help="longest answer in tokens (default: to the end of the slot)")
    add("--slots", type=int, help="sequences that run at once (default: one for each prompt, up to 8)")
    add("--max-len", type=int, help="length of a slot, prompt and answer together (default: 1024, or what fits)")
    add("--policy", default="continuous", help="continuous, static or serial")
    add("--compact", action="store_true", help="leave idle rows out: faster, equal tokens, other bits")
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens that reach this probability together")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens")
    add("--min-p", type=float, default=0.0, help="keep tokens at least this fraction as likely as the likeliest")
    add("--repetition-penalty", type=float, default=1.0, help="above 1, recent tokens become less likely")
    add("--seed", type=int, help="the same seed gives the same tokens")
    add("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Stream the answers in the prompts' order, while all of them run. 2 if the input was at fault."""
    args = parse_arguments(arguments)
    handles: list[Handle] = []
    if sys.stdin is None:  # closed by the caller: then the first file to be opened would pass for standard input
        os.open(os.devnull, os.O_RDONLY)
    try:
        stdin = sys.stdin.read() if sys.stdin and "-" in (args.prompt or ["-"]) else ""
        prompts = [stdin if prompt == "-" else prompt for prompt in args.prompt or ["-"]]
        slots = min(len(prompts), 8) if args.slots is None else args.slots
        settings = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
        sampling = Sampling(**{name: getattr(args, name) for name in settings}, ignore_eos=args.ignore_eos)
        options = {"slots": slots, "max_len": args.max_len, "policy": args.policy, "exact": not args.compact}
        with Engine.load(args.model, **options) as engine:
            chat = engine.text.has_template and not args.raw
            for prompt in prompts:
                asked = [{"role": "user", "content": prompt}] if chat and prompt else prompt
                handles.append(engine.submit(asked, sampling))
            print(f"nanobatch: {engine.summary}", file=sys.stderr)
            if not engine.text.has_template and not args.raw:
                print("nanobatch: this model has no chat template; prompts are taken as plain text", file=sys.stderr)
            with engine.serving():
                for handle, prompt in zip(handles, prompts, strict=True):
                    show(handle, prompt)
    except (ValueError, QueueFull, UnicodeDecodeError) as error:
        print(f"nanobatch: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None  # so that Python does not try to flush it at exit
        return 141
    except OSError as error:  # a full disk
        sys.stdout = None
        print(f"nanobatch: the answer cannot be written: {error}", file=sys.stderr)
        return 1
    return 1 if any(handle.finish_reason == "error" for handle in handles) else 0


def show(handle: Handle, prompt: str) -> None:
    """One answer as it comes, and one line of figures under it."""
    print(f"--- {handle.id + 1}: {printable(' '.join(prompt.split()))[:100]}")
    for piece in handle:
        print(printable(piece), end="", flush=True)
    result = handle.result()
    m = result.metrics
    ttft = "-" if m.ttft_s is None else f"{m.ttft_s * 1000:.0f} ms"
    rate = "-" if m.tokens_per_s is None else f"{m.tokens_per_s:.0f} tokens/s"
    print(f"\n    [{result.finish_reason}: {m.output_tokens} tokens, TTFT {ttft}, {rate}]", flush=True)
    if result.error:
        print(f"nanobatch: request {handle.id + 1}: {printable(result.error)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
