"""The screen shows how many cores other programs use."""

from pathlib import Path

import pytest

from base.machine import my_cores
from engine.cpu_contention import IDLE, LEAST, OtherPrograms, Worked, counted
from screen.draw import status

STAT = """cpu  1000 0 0 9999 0 0 0 0 0 0
cpu0 100 20 30 800 50 4 3 2 0 0
cpu1 200 0 0 600 0 0 0 0 0 0
cpu12 500 0 0 0 0 0 0 0 0 0
intr 12345
"""


class Machine:
    """A machine with a simulated clock."""

    def __init__(self, cores: int, counts: bool = True):
        self.now = self.mine = self.busy = self.idle = 0.0
        self.counts = counts
        self.load = 0.0
        self.others = OtherPrograms(
            self.read, lambda: self.now, lambda: self.mine, lambda: self.load
        )
        self.others.cores = cores

    def read(self, cores: set[int]) -> Worked | None:
        return Worked(self.busy, self.idle) if self.counts else None

    def second(self, own: float, others: float) -> float:
        self.now += 1
        self.mine += own
        self.busy += own + others
        self.idle += self.others.cores - own - others
        return self.others.used_cores()


def test_only_cores_of_this_process_count():
    assert counted(STAT, {0, 1}, 100) == Worked(3.59, 14.5)
    assert counted(STAT, {12}, 100) == Worked(5, 0)
    assert counted(STAT, {7}, 100) is None and counted("", {0}, 100) is None
    zeros = "cpu0 0 0 0 0 0 0 0 0 0 0\n"  # a sandbox that does not count time
    assert counted(zeros, {0}, 100) is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="looks at /proc")
def test_this_machine_is_read():
    others = OtherPrograms()
    assert others.cores == len(my_cores()) > 0
    assert others.used_cores() == 0.0, "a second has not passed yet"


@pytest.mark.parametrize("counts", [True, False])
def test_the_engines_own_work_is_not_others(counts):
    machine = Machine(4, counts)
    for second in range(300):
        machine.load = 4 * (1 - 0.98**second)  # the entire load is this process's own
        assert machine.second(own=4, others=0) == 0.0


def test_other_programs_count_where_no_core_is_idle():
    machine = Machine(2)
    assert machine.second(own=1.2, others=0.8) == pytest.approx(0.8)
    assert machine.second(own=0.4, others=1.6) == pytest.approx(1.6)
    assert machine.second(own=0.4, others=1.6 - 2 * IDLE) == 0.0, "a core was idle"
    assert machine.second(own=1.9, others=2 * LEAST - 0.42) == 0.0, "every system does so much"
    machine.now += 0.5
    assert machine.others.used_cores() == 0.0, "between two seconds nothing is read"


def test_the_load_average_replaces_missing_counts():
    machine = Machine(2, counts=False)
    machine.load = 3.0
    assert machine.second(own=0.5, others=0) == 2.0, "no more than there are"
    machine.load = 0.3
    assert machine.second(own=0.5, others=0) == 0.0


def test_the_header_names_other_programs(stage):
    """Regression: "219 ms = build 170" blamed the engine for the time of other programs."""
    stage.obey("/burst 20")
    stage.turns(70)
    (before,) = stage.lines(status.draw_status, 80, 1)
    stage.state.view = stage.state.view._replace(others=1.58, cores=2)
    (line,) = stage.lines(status.draw_status, 80, 1)
    assert "others: 1.6 of 2 cores" in line and "others" not in before
