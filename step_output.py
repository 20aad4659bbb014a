"""What a step yields for one request: a token with its log probabilities, or a prompt's vector. Plain Python,
without MLX."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from base.validation import whole


class TokenLogprob(NamedTuple):
    """The log probabilities of a token and of the most likely tokens. Under a grammar, only the allowed
    tokens count."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    free: tuple[tuple[int, float], ...] = ()  # the most likely tokens without the grammar


class StepOutput(NamedTuple):
    """The output of one row of a step."""

    token: int  # -1 if the logits were not finite
    logprob: TokenLogprob | None = None  # if the request asked for log probabilities
    vector: array | None = None  # if it asked for a vector: the prompt's last hidden state, (D,)


TokenLogprobs = list[TokenLogprob]  # for each token of an answer


def unit_vector(vector: Sequence[float], dimensions: int | None = None) -> array:
    """Scale a vector, or its first `dimensions` numbers, to length 1."""
    if dimensions is not None:
        vector = vector[: whole("dimensions", dimensions, 1, len(vector))]
    length = math.sqrt(math.fsum(x * x for x in vector))
    if not math.isfinite(length):
        raise RuntimeError("the model computed a vector with a number that is not finite")
    return array("f", [x / length for x in vector] if length else vector)
