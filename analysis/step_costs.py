"""What a step reads and multiplies, counted from the model's sizes, and what it takes at least.

The problem. "3.4 ms a step" tells neither why eight answers cost hardly more than one, nor where that
ends.

What this file keeps. What is counted is what the engine does, not what would be necessary: where
attention slides, older rows are read all the same, and hidden. And a bill is what a step takes at
least, for four things are left out. A chunk that copies rows which its own pass writes starts a
second pass. Neighbours that share a product read as far as the longest of them. An expert is
multiplied with each of its tokens by itself, and read anew unless a cache keeps it. The numbers
between two products are written and read, too.

Where next: `models/param_count.py`, where the sizes come from; `screen/pages/step_cost.py`, which shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.model_cost import ModelCost
from runtime.snapshot import Roof


class Member(NamedTuple):
    """One sequence in a step."""

    request: int | None
    tokens: int  # that are computed for it
    rows: int  # that each of these looks back on; the last of them is the token's own


class Bill(NamedTuple):
    """What a step reads and multiplies. Bytes, and operations: a product and a sum are two."""

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
    """What a step has to do. Of all its sequences together:"""

    tokens: int  # that are computed
    rows: int  # that are looked back on
    looks: int  # tokens x rows: how often a query is compared with a key
    asked: int  # tokens that yield a next one

    @staticmethod
    def of(parts: Sequence[Member], asked: int) -> Work:
        return Work(
            tokens=sum(part.tokens for part in parts),
            rows=sum(part.rows for part in parts),
            looks=sum(part.tokens * part.rows for part in parts),
            asked=asked,
        )


def bill_of(model: ModelCost, work: Work, experts: Sequence[int] = ()) -> Bill:
    """The bill of one pass. Unless a token is asked, nothing behind the keys and values of the last
    layer is computed.

    `experts`: how many were taken in each layer; by default, as many as are to be expected.
    """
    tokens = work.tokens
    inside = [tokens] * (model.layers - 1) + [work.asked]  # tokens behind each layer's attention
    distinct = experts or [expected(model, each) for each in inside]
    weights = model.body_nbytes + tokens * model.token_nbytes + sum(distinct) * model.expert_nbytes
    products = tokens * model.body_products + sum(inside) * model.taken * model.expert_products
    layers = model.layers - 1
    if work.asked:
        weights += model.tail_nbytes
        products += work.asked * model.tail_products
        layers = model.layers
    return Bill(
        tokens=tokens,
        weights=weights,
        keys=work.rows * layers * model.row_nbytes,
        products=2 * products,
        attention=4 * work.looks * layers * model.width,
    )


def expected(model: ModelCost, tokens: int) -> float:
    """How many experts of a layer so many tokens take together, if each chooses by chance."""
    if not model.experts:
        return 0
    return model.experts * (1 - (1 - model.taken / model.experts) ** tokens)


class Floors(NamedTuple):
    """Seconds that the roof leaves to a step at least."""

    reading: float
    multiplying: float

    @property
    def longest(self) -> float:
        return max(self)


def floors_of(bill: Bill, roof: Roof) -> Floors | None:
    if not roof.reading:
        return None
    return Floors(bill.nbytes / roof.nbytes_per_s, bill.operations / roof.multiplying)


def of_rows(model: ModelCost, rows: int, length: int) -> Bill:
    """A step in which so many sequences decode, each of this length."""
    looks = rows * length
    return bill_of(model, Work(rows, looks, looks, rows))
