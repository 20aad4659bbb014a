"""Count the bytes and operations of a forward pass, and bound its time from below.

`ModelCost` is counted from the model's own arrays when it is loaded. The config is not enough, because
weights may be packed, shared with the embedding, or divided among ranks. Each array is counted once,
where `forward` uses it. `pass_cost` derives the cost of a step from these counts.

The counts follow what the engine does: with sliding attention it also reads older rows and masks them.
The cost is a lower bound, because it leaves out five things: the second pass for a chunk that copies rows
of its own pass, rows beyond a sequence's length that are read because its neighbours are longer, experts
that a GPU reads more than once, the logs of states, and activations.

Everything except counting a loaded model is plain Python, because a screen draws costs before MLX is
loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from kernels.device import mx
    from kernels.packed import Matrix
    from models.layers import Model

T = TypeVar("T")


class ModelCost(NamedTuple):
    """The counts from which the cost of any pass is derived. With several ranks, they are those of the
    first rank's shard.

    A pass reads its weights once for all of its tokens. Only tokens whose next token is sampled go
    through the *tail*, which is everything after the last layer's attention. All other matrices are
    the *body*. Experts are counted separately, because each token uses only some of them.
    `..._products`: the number of weights by which each token is multiplied.
    """

    form: str = ""  # format of the weights: "float32", or "4 bits in groups of 64" if packed
    layers: int = 0
    body_nbytes: int = 0
    body_products: int = 0
    tail_nbytes: int = 0
    tail_products: int = 0
    token_nbytes: int = 0  # the embedding of one token
    row_nbytes: int = 0  # the keys and values of one row, in all layers with attention
    last_row_nbytes: int = 0  # the keys and values of one row in the last layer
    width: int = 0  # the sum of H * Dh over all layers with attention
    last_width: int = 0  # H * Dh of the last layer
    convolution_nbytes: int = 0  # size of the rows that a token's convolutions read
    state_nbytes: int = 0  # a sequence's delta net states, counted twice: read and written
    state_products: int = 0  # multiplications of a token with those states
    window: int | None = None  # rows visible in layers with sliding attention
    windowed: int = 0  # number of layers with sliding attention
    experts: int = 0  # experts per layer; 0: none
    taken: int = 0  # experts per token in each layer
    expert_nbytes: int = 0  # one expert of one layer
    expert_products: int = 0

    @property
    def nbytes(self) -> int:
        """The size of all weights that a pass may read."""
        experts = self.layers * self.experts * self.expert_nbytes
        return self.body_nbytes + self.tail_nbytes + experts


# --- a step -------------------------------------------------------------------------------------


class Member(NamedTuple):
    """One sequence in a step."""

    request: int | None
    tokens: int  # tokens computed
    rows: int  # rows that each of these tokens attends to, its own included


class StepCost(NamedTuple):
    """The bytes that a step reads, and its operations (a multiply-add counts as two)."""

    tokens: int
    weights: float
    keys: int
    products: float
    attention: int
    states: int = 0

    @property
    def nbytes(self) -> float:
        return self.weights + self.keys + self.states

    @property
    def operations(self) -> float:
        return self.products + self.attention


class Work(NamedTuple):
    """The work of a step, summed over its sequences."""

    tokens: int  # tokens computed
    rows: int  # rows attended to
    looks: int  # tokens x rows: pairs of a query and a key
    asked: int  # tokens whose logits are computed
    sequences: int = 0

    @staticmethod
    def from_members(parts: Sequence[Member], asked: int) -> Work:
        return Work(
            tokens=sum(part.tokens for part in parts),
            rows=sum(part.rows for part in parts),
            looks=sum(part.tokens * part.rows for part in parts),
            asked=asked,
            sequences=len(parts),
        )


def pass_cost(model: ModelCost, work: Work, experts: Sequence[int] = ()) -> StepCost:
    """Return the cost of one pass. A pass without logits ends after the keys and values of the last
    layer.

    `experts`: number of distinct experts used in each layer; by default the expected number.
    """
    tokens = work.tokens
    inside = [tokens] * (model.layers - 1) + [work.asked]  # tokens after each layer's attention
    distinct = experts or [expected(model, each) for each in inside]
    weights = model.body_nbytes + tokens * model.token_nbytes + sum(distinct) * model.expert_nbytes
    products = tokens * (model.body_products + model.state_products)
    products += sum(inside) * model.taken * model.expert_products
    row_nbytes = model.row_nbytes - model.last_row_nbytes
    width = model.width - model.last_width
    if work.asked:
        weights += model.tail_nbytes
        products += work.asked * model.tail_products
        row_nbytes, width = model.row_nbytes, model.width
    return StepCost(
        tokens=tokens,
        weights=weights,
        keys=work.rows * row_nbytes + tokens * model.convolution_nbytes,
        products=2 * products,
        attention=4 * work.looks * width,
        states=work.sequences * model.state_nbytes,
    )


def expected(model: ModelCost, tokens: int) -> float:
    """Return the expected number of distinct experts in a layer if each token chooses at random."""
    if not model.experts:
        return 0
    return model.experts * (1 - (1 - model.taken / model.experts) ** tokens)


def of_rows(model: ModelCost, rows: int, length: int) -> StepCost:
    """Return the cost of a decode step with this many sequences (`rows`), all of the same length."""
    looks = rows * length
    return pass_cost(model, Work(rows, looks, looks, rows, rows))


# --- the roofline -------------------------------------------------------------------------------


class Roof(NamedTuple):
    """The roofline of this machine (`engine/roofline.py`). 0 means not measured yet."""

    reading: float = 0.0  # bytes per second, for weights too large for any cache
    # Bytes per second for weights of the model's size, which may fit into a cache
    again: float = 0.0
    multiplying: float = 0.0  # floating-point operations per second
    others: float = 0.0  # cores that other programs used during the measurement

    @property
    def nbytes_per_s(self) -> float:
        """The bandwidth at which the model's weights can be read."""
        return max(self.reading, self.again)

    def joined(self, other: Roof) -> Roof:
        """Combine two measurements: the higher of each rate, and the lower `others`."""
        if not self.reading:
            return other
        best = Roof(*map(max, self, other))
        return best._replace(others=min(self.others, other.others))


class Floors(NamedTuple):
    """Lower bounds on the time of a step in seconds, from the roofline."""

    reading: float
    multiplying: float

    @property
    def longest(self) -> float:
        return max(self)


def floors_of(cost: StepCost, roof: Roof) -> Floors | None:
    if not roof.reading:
        return None
    return Floors(cost.nbytes / roof.nbytes_per_s, cost.operations / roof.multiplying)


# --- counting a loaded model --------------------------------------------------------------------


def counted(model: Model) -> ModelCost:
    """Count the cost of this rank's shard of a model."""
    c = model.config
    *before, last = model.layers
    inputs = model.layer_inputs
    body = [last.attn_norm, last.qkv, last.qk_norm, last.gate, last.mixer, before]
    body += [inputs.projection, inputs.norm] if inputs else []
    tail = [
        last.out,
        last.mlp_norm,
        last.mlp,
        last.after,
        model.norm,
        model.head,
    ]
    experts = max(1, c.experts)
    spans = [model.kinds[layer.kind].span for layer in model.layers]
    attending = [layer for layer in range(c.layers) if layer not in (*c.convolved, *c.deltas)]
    windows = [spans[layer] for layer in attending if spans[layer]]
    # The row of each array in the slab. A delta net has a state instead of rows
    rows = [row for layer in range(c.layers) if (row := c.row(layer))[0]]
    row_nbytes = {
        layer: math.prod(rows[model.layers[layer].slab_index]) * model.kv_dtype.size
        for layer in attending
    }
    numbers = len(c.deltas) * c.delta.Hv * c.delta.Dk * c.delta.Dv if c.delta else 0
    widths = {layer: c.H * c.heads(layer).Dh for layer in attending}
    return ModelCost(
        form=form_of(matrices([body, tail])),
        layers=c.layers,
        body_nbytes=nbytes(body),
        body_products=products(body),
        tail_nbytes=nbytes(tail),
        tail_products=products(tail),
        token_nbytes=nbytes(model.table) // c.V
        + (nbytes(inputs.table) // c.embeddings_V if inputs else 0),
        row_nbytes=sum(row_nbytes.values()),
        last_row_nbytes=row_nbytes.get(c.layers - 1, 0),
        width=sum(widths.values()),
        last_width=widths.get(c.layers - 1, 0),
        convolution_nbytes=len(c.convolved) * c.taps * c.D * model.kv_dtype.size,
        state_nbytes=2 * 4 * numbers,
        state_products=3 * numbers,  # S with k, S with q, and k d^T
        window=min(windows, default=None),
        windowed=len(windows),
        experts=c.experts,
        taken=c.taken if c.experts else 0,
        expert_nbytes=sum(each.nbytes for each in arrays(stacks(last))) // experts,
        expert_products=sum(stack.size for stack in stacks(last)) // experts,
    )


def leaves(part: object, kind: type[T]) -> list[T]:
    """Return all objects of this type in a part of the model."""
    if isinstance(part, kind):
        return [part]
    if isinstance(part, dict):
        part = list(part.values())
    if not isinstance(part, (list, tuple)):
        return []
    return [leaf for each in part for leaf in leaves(each, kind)]


def arrays(part: object) -> list[mx.array]:
    from kernels.device import mx

    return leaves(part, mx.array)


def matrices(part: object) -> list[Matrix]:
    from kernels.packed import Matrix

    return leaves(part, Matrix)


def stacks(part: object) -> list[Matrix]:
    """Return the stacked matrices of experts."""
    return [matrix for matrix in matrices(part) if matrix.weight.ndim > 2]


def nbytes(part: object) -> int:
    """Return the memory of a part's arrays, excluding experts."""
    of_experts = sum(each.nbytes for each in arrays(stacks(part)))
    return sum(each.nbytes for each in arrays(part)) - of_experts


def nbytes_of(model: Model) -> int:
    """Return the memory of a model's weights. A tied head is the embedding table and counts once."""
    held = arrays((model.layers, model.norm, model.table, model.head, model.layer_inputs))
    return sum({id(array): array.nbytes for array in held}.values())


def products(part: object) -> int:
    """Return the number of multiplications per token in a part, excluding experts."""
    return sum(matrix.size for matrix in matrices(part) if matrix.weight.ndim == 2)


def form_of(matrices: Iterable[Matrix]) -> str:
    """Return the formats of the matrices as text, the most frequent first."""
    sizes: Counter[str] = Counter()
    for matrix in matrices:
        form = str(matrix.weight.dtype).split(".")[-1]
        if form == "uint32":
            form = f"{matrix.bits} bits in groups of {matrix.group}"
        sizes[form] += matrix.size
    return " and ".join(form for form, _ in sizes.most_common())
