"""The cost of a forward pass in plain numbers: bytes that are read, and products."""

from typing import NamedTuple


class ModelCost(NamedTuple):
    """What a forward pass reads and multiplies, counted once when the model is loaded; with several
    ranks, the shard of the first one.

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
    row_nbytes: int = 0  # of a row of one layer: its key and its value
    width: int = 0  # of all query heads of a layer: H * Dh
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
