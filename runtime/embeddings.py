"""The vector of a text, as its owner gets it: plain Python, without MLX.

The problem. A model computes a state of any size. What is compared are directions, so a vector has
the length 1. Some models were trained so that the first numbers of a vector are a vector, too.

What this file keeps. A vector depends on the state alone, so it has the same bits in any company.

Where next: `models/embedding_support.py`, which says what a model was made for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from runtime.validation import whole


def unit(state: Sequence[float], dimensions: int | None = None) -> array:
    """A state's first numbers, or all of them, with the length 1."""
    if dimensions is not None:
        state = state[: whole("dimensions", dimensions, 1, len(state))]
    length = math.sqrt(math.fsum(x * x for x in state))
    if not math.isfinite(length):
        raise RuntimeError("the model computed a vector with a number that is not finite")
    return array("f", [x / length for x in state] if length else state)
