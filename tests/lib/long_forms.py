"""Long forms of tests (CONTRIBUTING.md). `NANOBATCH_LONG=10` runs what the short form leaves out, with ten
times as many random cases; a variable such as `NANOBATCH_SCHEDULES` sets a single number."""

import os

import pytest

TIMES = int(os.environ.get("NANOBATCH_LONG", "1"))
IS_LONG = TIMES > 1
long_form = pytest.mark.skipif(not IS_LONG, reason="a long form: NANOBATCH_LONG=10")


def number_of(name: str, usual: int) -> int:
    """Return the number of random cases to try."""
    return int(os.environ.get(f"NANOBATCH_{name}", usual * TIMES))


def some(cases: list, usual: int) -> list:
    """Return all cases in the long form, otherwise about this many, spread over the list."""
    return cases if IS_LONG else cases[:: -(-len(cases) // usual)]
