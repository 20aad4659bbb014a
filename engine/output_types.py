"""The output of a step for one request, in plain Python: token, log probabilities, a prompt's vector."""

from __future__ import annotations

from array import array
from typing import NamedTuple


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
