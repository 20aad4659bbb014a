"""An example of hidden checks for stage 4."""

import pytest

from course.from_zero.test_4_sampling import PROBABILITIES, assert_likely, draws


@pytest.mark.about("draw")
def test_filters_together():
    """A row with two filters keeps the tokens that both keep, next to rows without filters."""
    tokens = draws({"temperature": 0.5, "top_k": 4, "top_p": 0.8}, {"temperature": 0.5})
    squares = [p**2 for p in PROBABILITIES]
    assert_likely(tokens[0::2], [p / sum(squares[:3]) for p in squares[:3]] + [0, 0])
    assert_likely(tokens[1::2], [p / sum(squares) for p in squares])
