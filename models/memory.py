"""Choose the number of slots and their length to fit the free memory, and check that all ranks agree.

MLX does not raise when memory runs out: the process dies. So the sizes of weights and slab are computed
before any tensor is read. Ranks are compared because MLX would add up arrays of different models without
an error.

Free memory is measured in `kernels/device.py` (GPU) and `base/machine.py`.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from base import foreign_modules, validation
from base.untrusted_files import ModelError
from kernels import device
from kernels.c_attention import label_rows
from kernels.delta_net import LOG
from kernels.device import has_gpu, mx, readable
from models.config import Config
from models.forward_cost import nbytes_of
from models.layers import Model

# The root modules that a step runs
CORE = [
    "kv",
    "llama",
    "logprobs",
    "nanobatch",
    "policies",
    "prefix",
    "prompt_lookup",
    "request",
    "runner",
    "sampling",
    "sampling_params",
    "sched",
    "state_places",
    "step_output",
    "token_choice",
]
# Packages whose code a step may run
BELOW = (
    "base",
    "cli",
    "distributed",
    "engine",
    "kernels",
    "models",
    "text",
)


# Chunks are multiples of this many tokens, so that a slot holds a whole number of buckets (`Slab`)
GRAIN = 32
CHECKPOINTS = 2  # per slot, by default


class Sizes(NamedTuple):
    """The sizes of an engine's slab and steps."""

    slots: int
    max_len: int  # length of a slot in tokens
    chunk: int
    budget: int
    checkpoints: int = 0  # states kept for later prompts, in a model with states


def fit(
    c: Config,
    itemsize: int,
    free: int | None,
    slots: int | None = None,
    max_len: int | None = None,
    chunk: int | None = None,
    budget: int | None = None,
    usual_len: int = 1024,
    checkpoints: int | None = None,
    state_memory: int | None = None,
    **other,  # engine options that take no memory
) -> Sizes:
    """Keep the given sizes and choose the others to fit into memory. Raise ValueError if they do not
    fit.

    `itemsize`: bytes per number in the slab.
    `free`: bytes available for the slab; None if unknown.
    `state_memory`: bytes for the checkpoints of a model with states. By default there are CHECKPOINTS
    per slot.
    """
    asked = {"slots": slots, "max_len": max_len, "chunk": chunk, "budget": budget}
    for name, value in asked.items():
        if value is not None:
            validation.whole(name, value, 1, 2**31 - 1)
    if chunk is None:
        # Longer chunks are faster only on a GPU
        chunk = 512 if has_gpu() else 128
    if chunk % GRAIN:
        raise ValueError(f"chunk = {chunk}, but it must be a multiple of {GRAIN}")
    count = slots or 8
    length = max_len or min(usual_len, c.max_positions)
    room = math.inf if free is None else 0.9 * free

    if state_memory is not None and c.delta:
        checkpoints = state_memory // state_nbytes(c, 1)

    def kept(count: int) -> int:
        usual = CHECKPOINTS * count if checkpoints is None else checkpoints
        return usual if c.delta else 0

    def taken(count: int, length: int) -> int:
        return nbytes_with(c, itemsize, Sizes(count, length, chunk, 0, kept(count)))

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
    return Sizes(count, length, chunk, budget or usual_budget(count, chunk), kept(count))


def usual_budget(slots: int, chunk: int) -> int:
    """Return the default budget: one token per slot and two chunks, so that two prompts are prefilled
    in the same step."""
    return slots + 2 * chunk


def fit_beside(model: Model, *asked: int | None) -> Sizes:
    """Choose sizes that fit next to a loaded model."""
    return fit(model.config, model.kv_dtype.size, device.free_memory(), *asked)


def agreed(model: Model, own: Sizes) -> Sizes:
    """Return the same sizes on all ranks: the minimum of each size."""
    if model.ranks.size == 1:
        return own
    check_alike(model)
    return Sizes(*map(min, *model.ranks.gather(*own)))


def described(model: Model, sizes: Sizes) -> str:
    """Describe a model, its slab, and the memory that is free before the slab is allocated, in one
    line."""
    c = model.config
    slab = slab_of(model, sizes)
    slots = f"{sizes.slots} slot{'s' * (sizes.slots > 1)} of {sizes.max_len:,} tokens"
    # A mixture of tensor types has its own name, such as Q4_K_M
    form = model.quantization if " and " in model.cost.form else model.cost.form
    said = [
        f"{c.model_type}, {c.layers} layer{'s' * (c.layers > 1)}",
        f"{form}, {readable(nbytes_of(model))}",
        *(["activations of 8 bits"] if model.arithmetic == "int8" else []),
        f"{slots} in a slab of {readable(slab)}",
    ]
    if c.delta:
        checkpoints = readable(sizes.checkpoints * state_nbytes(c, 1))
        said.append(f"of that {checkpoints} for {sizes.checkpoints} checkpoints of states")
        if model.attention != "c":
            said.append("states are computed by the formula, slowly")
    if device.has_gpu() and not c.cap and not c.sinks and model.attention == "formula":
        said.append("MLX's fused attention is wrong here, so the formula runs")
    free = device.free_memory()
    if free is not None and model.ranks.size == 1:
        said.append(f"{readable(free)} of memory free at start")
    return "; ".join(said)


def slab_of(model: Model, sizes: Sizes) -> int:
    """Return the size of this model's slab in bytes, including states."""
    return nbytes_with(model.config, model.kv_dtype.size, sizes)


def nbytes_with(c: Config, itemsize: int, sizes: Sizes) -> int:
    """Return the size of slab and states in bytes."""
    rows = slab_nbytes(*slab_shape(c, *sizes[:3]), itemsize)
    numbers = sum(heads * Dh for heads, Dh in rows_of_layers(c))
    rows = rows * numbers // (2 * c.Hkv * c.layers * c.Dh)
    if not c.delta:
        return rows
    return rows + sizes.slots * state_nbytes(c, LOG) + sizes.checkpoints * state_nbytes(c, 1)


def state_nbytes(c: Config, log: int) -> int:
    """Return the size of one state over all layers in bytes. `log`: number of tokens in its log."""
    return 4 * len(c.deltas) * c.delta.place_size(log)


def sources() -> list[Path]:
    """Return the source files that must be identical on all ranks, in a fixed order."""
    checkout = Path(__file__).resolve().parents[1]
    # In the installed package, nanobatch.py is called _engine.py
    core = [path for path in checkout.glob("*.py") if path.stem in (*CORE, "_engine")]
    below = [path for package in BELOW for path in checkout.glob(f"{package}/*")]
    below = [path for path in below if path.suffix in (".py", ".c")]
    return [*sorted([*core, *below]), *foreign_modules.foreign().values()]


def check_alike(model: Model) -> None:
    """Refuse ranks with different code or models, whose arrays MLX would add up without an error."""
    marks = [zlib.crc32(path.read_bytes()) for path in sources()]
    alike = {
        "version of nanobatch and MLX": (mx.__version__, marks),
        "model, dtype and activations": (
            replace(model.config, H=0, Hkv=0, hidden=0),
            str(model.dtype),
            str(model.kv_dtype),
            model.arithmetic,
        ),
        # Distinguishes a model from a fine-tuned version of it
        "weights": model.norm.weight.tolist(),
    }
    for what, own in alike.items():
        marks = model.ranks.gather(zlib.crc32(repr(own).encode()) // 2)
        if len({mark for (mark,) in marks}) > 1:
            raise ModelError(
                f"rank {model.ranks.rank}: the ranks differ in their {what}; give all of them the same."
            )


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n up to `limit` that fits, or 0. Every n below one that fits must fit, too."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def slab_shape(c: Config, slots: int, max_len: int, chunk: int) -> tuple[int, int, int, int, int]:
    """Return the arguments for `Slab`. A slot holds a whole number of chunks, so that the last chunk
    can be padded."""
    chunks = -(-max_len // chunk)
    return c.layers, slots, c.Hkv, chunks * chunk, c.Dh


def rows_of_layers(c: Config) -> list[tuple[int, int]]:
    """Return (heads, head size) of a token's row, for each layer that has rows."""
    return [row for layer in range(c.layers) if (row := c.row(layer))[0]]


def slab_nbytes(layers: int, slots: int, Hkv: int, length: int, Dh: int, itemsize: int) -> int:
    """Return the size of a slab's keys and values in bytes."""
    length += label_rows(Dh, itemsize)
    return 2 * layers * slots * Hkv * length * Dh * itemsize


def is_batch_invariant(model: Model) -> bool:
    """True if a request's logits have the same bits in any batch.

    This holds with our own product on a CPU, for float32 and packed weights, if every rank uses it.
    (Instruction sets may differ, because a rank's part of a sum is the same in any batch.) MLX's own
    products do not guarantee it, nor do modules that replace ours.
    """
    is_ours = device.is_batch_invariant() and not foreign_modules.foreign()
    marks = model.ranks.gather(is_ours and model.is_float32)
    return all(mark == [True] for mark in marks)
