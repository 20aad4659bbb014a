"""What a token of a prompt takes of a step's budget, by how far it looks back.

The problem. A token late in a prompt is compared with all before it. If it cost no more than an early
one, a long prompt's last chunks would be several times the work of its first, and all who decode
beside it would wait.

What this file keeps. A price depends on two numbers alone, so a replay pays what the engine paid.

Where next: `Scheduler._chunks`, which pays; `far_position` in `parts/model/fit.py`.
"""

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
