"""Count the bytes that a forward pass reads and its operations, and the least time for them.

`ModelCost` is counted once, from the model's own arrays, when it is loaded. The config is not enough:
weights may be packed, shared with the embedding, or divided among ranks. Each array is counted once,
where `forward` uses it. `pass_cost` computes from it what one step reads and multiplies.

What the engine does is counted: with sliding attention, older rows are read, too, and masked. Five
things are left out, so the cost is a lower bound: the second pass for a chunk that copies rows of its own
pass, the rows beyond a sequence's length that neighbours make it read, experts that a GPU reads more
than once, the logs of states, and activations.

All but the count of a loaded model is plain Python: a screen draws costs before MLX is loaded.
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
    """The bytes and operations of a forward pass, counted once when the model is loaded; with several
    ranks, those of the first one's shard.

    A pass reads its weights once for all tokens in it. Only tokens whose next token is sampled go
    through the *tail*, everything after the last layer's attention. All other matrices are the
    *body*. Experts are counted separately: each token takes some of them in each layer.
    `..._products`: the number of weights that each token is multiplied by.
    """

    form: str = ""  # of the weights: "float32", or "4 bits" where they are packed
    layers: int = 0
    body_nbytes: int = 0
    body_products: int = 0
    tail_nbytes: int = 0
    tail_products: int = 0
    token_nbytes: int = 0  # of a token's embedding
    row_nbytes: int = 0  # of a row in all layers with attention: the keys and values that it reads
    last_row_nbytes: int = 0  # in the last layer
    width: int = 0  # of all query heads of all layers with attention: the sum of H * Dh
    last_width: int = 0  # of the last layer
    convolution_nbytes: int = 0  # of the rows that the convolutions of a token read
    state_nbytes: int = 0  # of a sequence: the matrices of its delta nets, read and written
    state_products: int = 0  # of a token with these matrices
    window: int | None = None  # rows that are seen in layers with sliding attention
    windowed: int = 0  # layers with that window
    experts: int = 0  # in each layer; 0: there are none
    taken: int = 0  # by each token, in each layer
    expert_nbytes: int = 0  # of one expert of one layer
    expert_products: int = 0

    @property
    def nbytes(self) -> int:
        """All weights that a pass may read."""
        experts = self.layers * self.experts * self.expert_nbytes
        return self.body_nbytes + self.tail_nbytes + experts


# --- a step -------------------------------------------------------------------------------------


class Member(NamedTuple):
    """One sequence in a step."""

    request: int | None
    tokens: int  # computed for it
    rows: int  # attended to by each of these; the last is the token's own


class StepCost(NamedTuple):
    """The bytes that a step reads, and its operations (a multiplication and an addition are two)."""

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

    tokens: int  # computed
    rows: int  # attended to
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
    """The cost of one pass. Unless logits are needed, nothing after the keys and values of the last
    layer is computed.

    `experts`: the number used in each layer; by default the expected number.
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
    """The expected number of distinct experts of a layer, if each token chooses at random."""
    if not model.experts:
        return 0
    return model.experts * (1 - (1 - model.taken / model.experts) ** tokens)


def of_rows(model: ModelCost, rows: int, length: int) -> StepCost:
    """A step in which this many sequences decode, each of this length."""
    looks = rows * length
    return pass_cost(model, Work(rows, looks, looks, rows, rows))


# --- the roofline -------------------------------------------------------------------------------


class Roof(NamedTuple):
    """The roofline of this machine (`engine/roofline.py`); 0: not measured yet."""

    reading: float = 0.0  # bytes a second, of weights that no cache holds
    # Bytes a second, of as many weights as the model has, which may fit a cache
    again: float = 0.0
    multiplying: float = 0.0  # floating-point operations a second
    others: float = 0.0  # cores that other programs took then

    @property
    def nbytes_per_s(self) -> float:
        """As fast as the model's weights can be read."""
        return max(self.reading, self.again)

    def joined(self, other: Roof) -> Roof:
        """The best of two measurements."""
        if not self.reading:
            return other
        best = Roof(*map(max, self, other))
        return best._replace(others=min(self.others, other.others))


class Floors(NamedTuple):
    """The least seconds that the roofline allows for a step."""

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
    """Count this rank's shard of the model."""
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
    # Of each array of the slab. A delta net has a state in place of rows
    rows = [row for layer in range(c.layers) if (row := c.row(layer))[0]]
    row_nbytes = {
        layer: math.prod(rows[model.layers[layer].index]) * model.kv_dtype.size
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
        state_products=3 * numbers,  # with k and q, and k d^T
        window=min(windows, default=None),
        windowed=len(windows),
        experts=c.experts,
        taken=c.taken if c.experts else 0,
        expert_nbytes=sum(each.nbytes for each in arrays(stacks(last))) // experts,
        expert_products=sum(stack.size for stack in stacks(last)) // experts,
    )


def leaves(part: object, kind: type[T]) -> list[T]:
    """All objects of this kind in a part of the model."""
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
    """The matrices of experts."""
    return [matrix for matrix in matrices(part) if matrix.weight.ndim > 2]


def nbytes(part: object) -> int:
    """The memory of a part's arrays, not counting those of its experts."""
    of_experts = sum(each.nbytes for each in arrays(stacks(part)))
    return sum(each.nbytes for each in arrays(part)) - of_experts


def nbytes_of(model: Model) -> int:
    """The memory of a model's weights. A tied head is the table, and counted once."""
    held = arrays((model.layers, model.norm, model.table, model.head, model.layer_inputs))
    return sum({id(array): array.nbytes for array in held}.values())


def products(part: object) -> int:
    """The number of weights by which a part multiplies each token, not counting those of its experts."""
    return sum(matrix.size for matrix in matrices(part) if matrix.weight.ndim == 2)


def form_of(matrices: Iterable[Matrix]) -> str:
    """The formats of the matrices, the most frequent first."""
    sizes: Counter[str] = Counter()
    for matrix in matrices:
        form = str(matrix.weight.dtype).split(".")[-1]
        if form == "uint32":
            form = f"{matrix.bits} bits in groups of {matrix.group}"
        sizes[form] += matrix.size
    return " and ".join(form for form, _ in sizes.most_common())
