"""What a token of a prompt costs of a step's budget, by how far it looks back.

The problem. A token late in a prompt is compared with all before it. If it cost the same as an early
one, the last chunks of a long prompt would be several times the work of the first, and all that
decode beside them would wait.

What this file keeps. A price depends on numbers alone, so a replay has the same prices as the engine,
on any machine and in a web page.

Where next: `Scheduler._chunks` in `sched.py`, which pays; `far_position` in `parts/model/fit.py`,
which says what is far for a model.
"""

from __future__ import annotations

from typing import NamedTuple

NARROWEST = 16  # tokens of a chunk at least, however late in a prompt
NEVER = 2**63  # no row is so far


class Price(NamedTuple):
    """`far`: at this row, looking back costs a token as much as all the rest of its layer."""

    far: int = NEVER

    def __call__(self, row: int, chunk: int) -> float:
        """The price of a token in a chunk from this row on: 1 at the beginning, 2 at row `far`.

        No chunk is cut narrower than NARROWEST for it, since a step has a price of its own, too.
        """
        return min(1 + row / self.far, max(1, chunk / NARROWEST))
