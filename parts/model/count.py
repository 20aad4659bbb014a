"""What a forward pass reads and multiplies, counted from the model's own arrays.

The problem. Why do eight answers cost as much as one? The answer is a sum of bytes and of products,
and no config has it: weights may be packed, shared with the embedding, or cut among ranks.

What this file keeps. Each array is counted where `forward` uses it, and once. An array that is in
memory twice, in two parts of the model, is read twice.

Where next: `parts/bill.py`, which makes the bill of a step of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from parts.api.views import ModelView
from parts.device.mlx import mx, tree_flatten
from parts.model.layers import Dense, Model, Packed, Stack


def counted(model: Model) -> ModelView:
    """For those who watch. What this rank has of the model is counted."""
    c = model.config
    *before, last = model.layers
    body = [last.attn_norm, last.qkv, last.qk_norm, before]
    tail = [
        last.out,
        last.mlp_norm,
        last.mlp,
        model.norm,
        model.head,
    ]
    stacks = leaves(last, Stack)
    experts = max(1, c.experts)
    spans = [model.kinds[layer.kind].span for layer in model.layers]
    windows = [span for span in spans if span]
    return ModelView(
        form=form_of(leaves([body, tail], Dense, Packed, Stack)),
        layers=c.layers,
        body_nbytes=nbytes(body),
        body_products=products(body),
        tail_nbytes=nbytes(tail),
        tail_products=products(tail),
        token_nbytes=nbytes(model.table) // c.V,
        row_nbytes=2 * c.Hkv * c.Dh * model.dtype.size,
        width=c.H * c.Dh,
        window=min(windows, default=None),
        windowed=len(windows),
        experts=c.experts,
        taken=c.taken if c.experts else 0,
        expert_nbytes=sum(array.nbytes for array in arrays(stacks)) // experts,
        expert_products=sum(weights(stack) for stack in stacks) // experts,
    )


def leaves(part: Any, *kinds: type) -> list[Any]:
    """All of these kinds in a part of the model. What is of one of them is not looked into."""
    found = tree_flatten(part, is_leaf=lambda each: isinstance(each, kinds))
    return [each for _, each in found if isinstance(each, kinds)]


def arrays(part: Any) -> list[mx.array]:
    return leaves(part, mx.array)


def nbytes(part: Any) -> int:
    """Of all arrays of a part, but of its experts."""
    found = leaves(part, mx.array, Stack)
    return sum(each.nbytes for each in found if isinstance(each, mx.array))


def nbytes_of(model: Model) -> int:
    """The memory that a model's weights take. A tied head is the table, and counted once."""
    held = arrays((model.layers, model.norm, model.table, model.head))
    return sum({id(array): array.nbytes for array in held}.values())


def products(part: Any) -> int:
    """By how many weights of this part each token is multiplied, but for its experts."""
    return sum(weights(each) for each in leaves(part, Dense, Packed))


def weights(matrix: Dense | Packed | Stack) -> int:
    """How many numbers a matrix has: of packed ones, each scale is for a group of them."""
    if matrix.weight.dtype == mx.uint32:
        return matrix.scales.size * matrix.group
    return matrix.weight.size


def form_of(parts: Iterable[Dense | Packed | Stack]) -> str:
    """How the numbers of the matrices are written, that of most of them first."""
    sizes: Counter[str] = Counter()
    for part in parts:
        form = str(part.weight.dtype).split(".")[-1]
        if part.weight.dtype == mx.uint32:
            form = f"{part.bits} bits in groups of {part.group}"
        sizes[form] += weights(part)
    return " and ".join(form for form, _ in sizes.most_common())
