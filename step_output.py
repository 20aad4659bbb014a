"""The output of a step for one request: token, log probabilities, a prompt's vector. Plain Python, without
MLX."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from base.validation import whole


class TokenLogprob(NamedTuple):
    """A token's log probability, and the most likely tokens with theirs: under a grammar, among the
    allowed tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    free: tuple[tuple[int, float], ...] = ()  # the top as it would be without the grammar


class StepOutput(NamedTuple):
    """The output of one row of a step."""

    token: int  # -1 if the logits were not finite
    logprob: TokenLogprob | None = None  # if it asked for them
    state: array | None = None  # if it asked for a vector: the prompt's last state, (D,)


TokenLogprobs = list[TokenLogprob]  # of all tokens of an answer


def unit_vector(state: Sequence[float], dimensions: int | None = None) -> array:
    """The vector of a text as its owner gets it: a state, or its first `dimensions` numbers, with the
    length 1."""
    if dimensions is not None:
        state = state[: whole("dimensions", dimensions, 1, len(state))]
    length = math.sqrt(math.fsum(x * x for x in state))
    if not math.isfinite(length):
        raise RuntimeError("the model computed a vector with a number that is not finite")
    return array("f", [x / length for x in state] if length else state)
