"""Choose slots and their length to fit the free memory, and check that all ranks agree.

Memory that runs out is no exception in MLX: the process dies. So weights and slab are measured before a
tensor is read. And ranks that differ would add up nonsense without complaint.
"""

from __future__ import annotations

import math
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from course.overlay import opened
from kernels import mlx as device
from kernels.c_attention import label_rows
from kernels.mlx import has_gpu, mx, readable
from models.config import Config
from models.forward_cost import nbytes_of
from models.layers import Model
from runtime import validation
from runtime.files import ModelError

# The files on top that a step runs
CORE = [
    "kv",
    "llama",
    "nanobatch",
    "policies",
    "prefix",
    "prompt_lookup",
    "runner",
    "sampling",
    "sched",
]
BELOW = (
    "distributed",
    "kernels",
    "models",
    "runtime",
    "text",
)  # packages that a step may run


# A chunk is a multiple of this many tokens. `Slab` asserts that a slot has whole buckets of rows.
GRAIN = 32


class Sizes(NamedTuple):
    """What an engine is made with."""

    slots: int
    max_len: int  # of a slot, in tokens
    chunk: int
    budget: int


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
    """Slots and their length as asked for, or chosen to fit the memory. A ValueError if that cannot
    be.

    `itemsize`: the bytes of one number in the slab.
    `free`: the bytes that the slab may take; None if that is not known.
    """
    asked = {"slots": slots, "max_len": max_len, "chunk": chunk, "budget": budget}
    for name, value in asked.items():
        if value is not None:
            validation.whole(name, value, 1, 2**31 - 1)
    if chunk is None:
        # A CPU is as quick with 128 tokens at a time, a GPU is not
        chunk = 512 if has_gpu() else 128
    if chunk % GRAIN:
        raise ValueError(f"chunk = {chunk}, but it must be a multiple of {GRAIN}")
    count = slots or 8
    length = max_len or min(usual_len, c.max_positions)
    room = math.inf if free is None else 0.9 * free

    def taken(count: int, length: int) -> int:
        return slab_nbytes(*slab_shape(c, count, length, chunk), itemsize)

    def most_slots() -> int:
        return largest(count, lambda n: taken(n, length) <= room)

    def longest() -> int:
        return chunk * largest(length // chunk, lambda n: taken(count, n * chunk) <= room)

    if slots is None:
        count = max(1, most_slots())
    if max_len is None and taken(count, length) > room:
        length = max(chunk, longest())
    if taken(count, length) > room:
        ways = [f"--slots {most_slots()}"] if most_slots() else []
        ways += [f"--max-len {longest()}"] if longest() else []
        slab = readable(taken(count, length))
        raise ValueError(
            f"{count} slots of {length:,} tokens take {slab}, but {readable(max(0, free))} are free; "
            f"{' or '.join(ways) or 'nothing smaller'} would fit"
        )
    return Sizes(count, length, chunk, budget or usual_budget(count, chunk))


def usual_budget(slots: int, chunk: int) -> int:
    """A token for each slot, a chunk, and half of one for every eight slots."""
    return slots + chunk + chunk * (slots // 8) // 2


def fit_beside(model: Model, *asked: int | None) -> Sizes:
    """Slots that fit next to a model whose weights have been read."""
    return fit(model.config, model.kv_dtype.size, device.free_memory(), *asked)


def agreed(model: Model, own: Sizes) -> Sizes:
    """Of several ranks all have the same sizes: the least that fits one."""
    if model.ranks.size == 1:
        return own
    check_alike(model)
    return Sizes(*map(min, *model.ranks.gather(*own)))


def described(model: Model, sizes: Sizes) -> str:
    """A line about a model, its slab, and the memory that is free before the slab is allocated."""
    c = model.config
    slab = slab_of(model, sizes)
    slots = f"{sizes.slots} slot{'s' * (sizes.slots > 1)} of {sizes.max_len:,} tokens"
    # A file of several types is known by its name, such as Q4_K_M
    form = model.quantization if " and " in model.cost.form else model.cost.form
    said = [
        f"{c.model_type}, {c.layers} layer{'s' * (c.layers > 1)}",
        f"{form}, {readable(nbytes_of(model))}",
        *(["activations of 8 bits"] if model.arithmetic == "int8" else []),
        f"{slots} in a slab of {readable(slab)}",
    ]
    if device.has_gpu() and not c.cap and not any(kind.has_kernel for kind in model.kinds):
        said.append("MLX's fused attention is wrong here, so the formula runs")
    free = device.free_memory()
    if free is not None and model.ranks.size == 1:
        said.append(f"{readable(free)} of memory are free")
    return "; ".join(said)


def slab_of(model: Model, sizes: Sizes) -> int:
    """The memory of a slab of these sizes for this model."""
    return slab_nbytes(*slab_shape(model.config, *sizes[:3]), model.kv_dtype.size)


def sources() -> list[Path]:
    """All that a step is made of, in the same order on every machine."""
    checkout = Path(__file__).resolve().parents[1]
    # In the package, nanobatch.py is called engine.py
    core = [path for path in checkout.glob("*.py") if path.stem in (*CORE, "engine")]
    below = [path for package in BELOW for path in checkout.glob(f"{package}/*")]
    below = [path for path in below if path.suffix in (".py", ".c")]
    own = opened()
    files = sorted([*core, *below, checkout / "course" / "overlay.py"])
    return [*files, *(own.files if own else ())]


def check_alike(model: Model) -> None:
    """Have all ranks the same program and model? Else they would add up nonsense, and MLX would not
    complain."""
    marks = [zlib.crc32(path.read_bytes()) for path in sources()]
    alike = {
        "version of nanobatch and MLX": (mx.__version__, marks),
        "model, dtype and activations": (
            replace(model.config, H=0, Hkv=0, hidden=0),
            str(model.dtype),
            str(model.kv_dtype),
            model.arithmetic,
        ),
        # Another training has changed these, too, if not every one
        "weights": model.norm.weight.tolist(),
    }
    for what, own in alike.items():
        marks = model.ranks.gather(zlib.crc32(repr(own).encode()) // 2)
        if len({mark for (mark,) in marks}) > 1:
            raise ModelError(
                f"rank {model.ranks.rank}: the ranks have not the same {what}; give all of them one."
            )


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `limit` that fits, 0 if not even 1 does. Everything smaller than what
    fits, fits."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def slab_shape(c: Config, slots: int, max_len: int, chunk: int) -> tuple[int, int, int, int, int]:
    """Arguments for `Slab`. A slot is a whole number of chunks long: more than the padding of the
    last one needs."""
    chunks = -(-max_len // chunk)
    return c.layers, slots, c.Hkv, chunks * chunk, c.Dh


def slab_nbytes(layers: int, slots: int, Hkv: int, length: int, Dh: int, itemsize: int) -> int:
    """The memory that a slab of these sizes takes: keys and values."""
    length += label_rows(Dh, itemsize)
    return 2 * layers * slots * Hkv * length * Dh * itemsize


def far_position(c: Config) -> int:
    """The position at which looking back on all before costs a token as much as everything else in
    a layer does.

    Measured on CPUs, with heads of 32 to 64: for one query head to look at one row (the score, its
    share of the softmax, the value added up) costs as much as 300 multiplications by weights. On a
    GPU it has not been measured: there chunks stay as wide as they are.
    """
    if has_gpu():
        return sys.maxsize
    projections = c.D * c.Dh * 2 * (c.H + c.Hkv)
    mlps = 3 * c.D * c.hidden * c.taken
    return max(1, (projections + mlps) // (300 * c.H))


def is_batch_invariant(model: Model) -> bool:
    """Do a request's logits have the same bits in any company?

    Our own product sees to that for float32 numbers on a CPU, and for packed weights, of which it
    makes such, if each process that shares the model has it. (Each may have it in a form of its own,
    since what a process adds to a sum is the same in any company.) Nobody has shown it for what MLX
    multiplies itself, nor for chapters that somebody else has written.
    """
    marks = model.ranks.gather(device.is_batch_invariant() and model.is_float32 and not opened())
    return all(mark == [True] for mark in marks)
