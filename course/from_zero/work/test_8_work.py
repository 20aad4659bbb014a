"""Compare the work with the reference's, counted in steps and rows, not in seconds."""

from dataclasses import replace

import pytest

from course.from_zero.shared_by_tests import ANSWERS, new_engine, steps_for
from course.from_zero.stages import names
from course.overlay import swapped


class Counted:
    """An embedding table that counts the rows that are looked up."""

    def __init__(self, table):
        self.table = table
        self.rows = 0

    def embed(self, ids):
        self.rows += ids.size
        return self.table.embed(ids)

    def __getattr__(self, name: str):
        return getattr(self.table, name)


def work() -> dict[str, int]:
    logits = []
    with new_engine(slots=3, budget=40) as engine:
        model = engine.runner.model
        table = Counted(model.table)

        def head(states):
            logits.append(len(states))
            return model.head(states)

        engine.runner.model = replace(model, table=table, head=head)
        steps = steps_for(engine, ANSWERS)
    return {"steps": steps, "rows computed": table.rows, "rows of logits": sum(logits)}


@pytest.mark.about("_may_stay_in_flight", "step", "start_sampling")
def test_work():
    """The work is counted, and compared with the reference's."""
    mine = work()
    with swapped(names()):
        ours = work()
    for what, count in mine.items():
        print(f"{what}: {count}, reference {ours[what]}")
    print(f"ratio {min(ours[what] / max(1, count) for what, count in mine.items()):.2f}")
