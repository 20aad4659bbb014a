"""Count the bytes that a step reads and its operations, from the model's sizes, and the least time for them.

What the engine does is counted: with sliding attention, older rows are read, too, and masked. Four
things are left out, so the cost is a lower bound: the second pass for a chunk that copies rows of its own
pass, the rows beyond a sequence's length that neighbours make it read, experts that are read more than
once, and activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.snapshot import Roof
from models.model_cost import ModelCost


class Member(NamedTuple):
    """One sequence in a step."""

    request: int | None
    tokens: int  # computed for it
    rows: int  # attended to by each of these; the last is the token's own


class StepCost(NamedTuple):
    """What a step reads (bytes) and computes (operations: a multiplication and an addition are two)."""

    tokens: int
    weights: float
    keys: int
    products: float
    attention: int

    @property
    def nbytes(self) -> float:
        return self.weights + self.keys

    @property
    def operations(self) -> float:
        return self.products + self.attention


class Work(NamedTuple):
    """The work of a step, summed over its sequences."""

    tokens: int  # computed
    rows: int  # attended to
    looks: int  # tokens x rows: pairs of a query and a key
    asked: int  # tokens whose logits are computed

    @staticmethod
    def of(parts: Sequence[Member], asked: int) -> Work:
        return Work(
            tokens=sum(part.tokens for part in parts),
            rows=sum(part.rows for part in parts),
            looks=sum(part.tokens * part.rows for part in parts),
            asked=asked,
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
    products = tokens * model.body_products + sum(inside) * model.taken * model.expert_products
    layers = model.layers - 1
    if work.asked:
        weights += model.tail_nbytes
        products += work.asked * model.tail_products
        layers = model.layers
    return StepCost(
        tokens=tokens,
        weights=weights,
        keys=work.rows * layers * model.row_nbytes,
        products=2 * products,
        attention=4 * work.looks * layers * model.width,
    )


def expected(model: ModelCost, tokens: int) -> float:
    """The expected number of distinct experts of a layer, if each token chooses at random."""
    if not model.experts:
        return 0
    return model.experts * (1 - (1 - model.taken / model.experts) ** tokens)


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


def of_rows(model: ModelCost, rows: int, length: int) -> StepCost:
    """A step in which this many sequences decode, each of this length."""
    looks = rows * length
    return pass_cost(model, Work(rows, looks, looks, rows))
