"""Run the stages' tests on our own chapters or, with `course/run.py`, on a student's.

The student's functions are used up to the stage under test, and ours for all later stages (in a
handout, those of stand_ins.py). A test of a blank function is skipped. The marker `about` names the
functions that a test covers; without it, a test covers all functions of its stage.
"""

import os
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from course import overlay
from course.from_zero.stages import STAGES, Stage, names

BLANK = set()  # blank functions of the student's chapters
if BOOK := overlay.opened():
    sys.path.insert(0, str(BOOK.folder))  # ahead of pytest's own `pythonpath`
    os.environ.setdefault("PYTEST_TIMEOUT", "60")  # limit per test; most take about one second
    BLANK = {name for name, _ in BOOK.blanks()}

FAKES = Path(__file__).with_name("stand_ins.py")
pytest.register_assert_rewrite("course.from_zero.shared_by_tests")


def pytest_configure() -> None:
    if not (BOOK or overlay.has_reference()):
        yours = "python course/run.py mine -m pytest"
        raise pytest.UsageError(f"our functions are blank in a handout; try yours: {yours}")


def stage_of(item: pytest.Item | pytest.FixtureRequest) -> Stage:
    return STAGES[int(item.path.name.split("_")[1]) - 1]


def about(item: pytest.Item) -> set[str]:
    """Return the functions that a test covers."""
    mark = item.get_closest_marker("about")
    return set(mark.args) if mark else {task.short for task in stage_of(item).tasks}


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Another stage's function may have the same short name
    blank = {task.short for task in stage_of(item).tasks if task.name in BLANK}
    if found := about(item) & blank:
        pytest.skip(f"{', '.join(sorted(found))}: blank")


@pytest.fixture(scope="module", autouse=True)
def later_stages_are_ours(request: pytest.FixtureRequest) -> Iterator[None]:
    if not BOOK:
        yield
        return
    later = names(stage_of(request).number + 1)
    file = None
    if not overlay.has_reference():
        faked = overlay.functions(FAKES.read_text(encoding="utf-8"))
        later = [name for name in later if name.partition(".")[2] in faked]
        file = FAKES
    with overlay.swapped(later, file):
        yield


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Show the actual and the expected value. For two drawings, show where they begin to differ."""
    if op != "==":
        return None
    if is_drawing(left) and is_drawing(right):
        return ["", *side_by_side(left, right)]
    return ["", f"came out         {left!r}", f"should come out  {right!r}"]


def is_drawing(found: object) -> bool:
    return isinstance(found, list) and len(found) > 1 and all(isinstance(x, str) for x in found)


def side_by_side(came: list[str], wanted: list[str]) -> list[str]:
    width = max(20, *(len(line) for line in (*came, *wanted)))
    lines = [f"{'came out':<{width}}   should come out"]
    mark = "   <- here"
    for left, right in zip_longest(came, wanted, fillvalue=""):
        line = f"{left:<{width}}   {right:<{width}}"
        if left != right:
            line += mark
            mark = ""
        lines.append(line.rstrip())
    return lines
