"""The percentiles in a handle's metrics."""

from engine.snapshot import percentile


def test_percentile_is_nearest_rank():
    """Regression: `/metrics` was off by one: it reported the longer of two steps as the median."""
    values = [3.0, 1.0, 2.0, *map(float, range(4, 101))]
    assert [percentile(values, part) for part in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert percentile([2.0, 1.0], 0.5) == 1
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None
