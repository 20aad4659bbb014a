"""A checkpoint becomes a model, and slots that fit the memory beside it."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kv import BUCKET, Slab
from parts import checkpoint, device
from parts.checkpoint import Config, ModelError, Weights
from parts.device import has_gpu, mx, size
from parts.ops import Dense, Quantized, SideBySide, rope_frequencies


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
        self.nbytes, free = self.weights.nbytes(self.config, self.float32), device.free_memory()
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
        if device._exiting.is_set():
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
