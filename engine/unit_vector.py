"""The vector of a text, as its owner gets it: plain Python, without MLX."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from base.validation import whole


def unit(state: Sequence[float], dimensions: int | None = None) -> array:
    """A state's first numbers, or all of them, with the length 1."""
    if dimensions is not None:
        state = state[: whole("dimensions", dimensions, 1, len(state))]
    length = math.sqrt(math.fsum(x * x for x in state))
    if not math.isfinite(length):
        raise RuntimeError("the model computed a vector with a number that is not finite")
    return array("f", [x / length for x in state] if length else state)
