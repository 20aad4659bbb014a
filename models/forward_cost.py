"""Count the bytes a forward pass reads and the products it computes, from the model's own arrays.

The config is not enough: weights may be packed, shared with the embedding, or divided among ranks. Each
array is counted once, where `forward` uses it. Next: `models/step_cost_model.py`, which computes a
step's costs from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kernels.device import mx, tree_flatten
from kernels.packed import Matrix
from models.layers import Model
from models.model_cost import ModelCost


def counted(model: Model) -> ModelCost:
    """Count this rank's shard of the model."""
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
    experts = max(1, c.experts)
    spans = [model.kinds[layer.kind].span for layer in model.layers]
    windows = [span for span in spans if span]
    return ModelCost(
        form=form_of(leaves([body, tail], Matrix)),
        layers=c.layers,
        body_nbytes=nbytes(body),
        body_products=products(body),
        tail_nbytes=nbytes(tail),
        tail_products=products(tail),
        token_nbytes=nbytes(model.table) // c.V,
        row_nbytes=2 * c.Hkv * c.Dh * model.kv_dtype.size,
        width=c.H * c.Dh,
        window=min(windows, default=None),
        windowed=len(windows),
        experts=c.experts,
        taken=c.taken if c.experts else 0,
        expert_nbytes=sum(each.nbytes for each in arrays(stacks(last))) // experts,
        expert_products=sum(stack.size for stack in stacks(last)) // experts,
    )


def leaves(part: Any, kind: type) -> list[Any]:
    """All objects of this kind in a part of the model."""
    found = tree_flatten(part, is_leaf=lambda each: isinstance(each, kind))
    return [each for _, each in found if isinstance(each, kind)]


def arrays(part: Any) -> list[mx.array]:
    return leaves(part, mx.array)


def stacks(part: Any) -> list[Matrix]:
    """The matrices of experts."""
    return [matrix for matrix in leaves(part, Matrix) if matrix.weight.ndim > 2]


def nbytes(part: Any) -> int:
    """The memory of a part's arrays, without its experts'."""
    of_experts = sum(each.nbytes for each in arrays(stacks(part)))
    return sum(each.nbytes for each in arrays(part)) - of_experts


def nbytes_of(model: Model) -> int:
    """The memory of a model's weights. A tied head is the table, and counted once."""
    held = arrays((model.layers, model.norm, model.table, model.head))
    return sum({id(array): array.nbytes for array in held}.values())


def products(part: Any) -> int:
    """The number of weights by which a part multiplies each token, without its experts'."""
    return sum(matrix.size for matrix in leaves(part, Matrix) if matrix.weight.ndim == 2)


def form_of(matrices: Iterable[Matrix]) -> str:
    """The formats of the matrices, the most frequent first."""
    sizes: Counter[str] = Counter()
    for matrix in matrices:
        form = str(matrix.weight.dtype).split(".")[-1]
        if matrix.weight.dtype == mx.uint32:
            form = f"{matrix.bits} bits in groups of {matrix.group}"
        sizes[form] += matrix.size
    return " and ".join(form for form, _ in sizes.most_common())
