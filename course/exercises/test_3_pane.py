"""Exercise 3: a pane.

    python -m pytest -x course/exercises/test_3_pane.py

The task. The slab is the scarcest memory of an engine. Draw a pane `memory` that shows how the rows
of all slots are used: by running requests (used), by earlier prompts that free slots remember
(remembered), or not at all (free). Draw a heading, and below it a line for each with its percentage
and a bar:

    ── Memory ─────────────── 8 slots × 1,024 rows ──
     used          37 % ███████████
     remembered    12 % ███
     free          51 % ███████████████

Round each percentage separately. If the cursor is in the past (arrow keys), the pane shows that
step, as the other panes do. But what free slots remembered at that time is no longer known, and a
pane must not show wrong numbers. So the last two lines become one: `free or remembered`. A pane can
have any width and height: leave out what does not fit, and never draw a line that is longer than
the width.

Read first: `draw_rate` in `screen/draw/charts.py`, the smallest chart; `Canvas` in `screen/draw/canvas.py`, on
which it draws, and `Pen` in `screen/draw/style.py`; `State.slots` and `State.past` in `screen/state.py`.

Where: a function `draw_memory` in `screen/draw/charts.py`; its name in `PANES` of `screen/app.py`
and in `CHARTS` of `screen/draw/layout.py`. `LOWER`, which includes `CHARTS`, then has it, too, and
`v` leads to the pane.

How to check: run the command above and `python -m pytest tests/screen -k "pane or memory"` (the
whole folder takes minutes). One of these tests compares each pane with a picture, and yours has
none yet. Write it, and look at it: `NANOBATCH_GOLDEN=write python -m pytest tests/screen -k memory`
writes `tests/screen/golden/pane-memory-80x24.txt`. Then run `python tui.py`, and press `b`, and `v`
until the pane appears.
"""

import re

import pytest
from rich.cells import cell_len
from screen_stage import Stage, drawn
from short_failures import not_done

from screen import app
from screen.draw import layout


def check_there_is_a_pane() -> None:
    if "memory" not in app.PANES:
        not_done("screen/app.py: PANES has no 'memory'")


def draw(state, width: int = 60, height: int = 8) -> list[str]:
    check_there_is_a_pane()
    lines = drawn(app.PANES["memory"], state, width, height)[:height]
    return ["".join(segment.text for segment in line) for line in lines]


def shares(lines: list[str]) -> dict[str, int]:
    """Parse the percentages of the pane: {"used": 37, ...}"""
    found = re.findall(
        r"^ *(used|remembered|free|free or remembered) +(\d+) %", "\n".join(lines), re.MULTILINE
    )
    return {name: int(percent) for name, percent in found}


def truth(slots, max_len: int, past: bool = False) -> dict[str, int]:
    whole, used = max_len * len(slots), sum(slot.used for slot in slots)
    remembered = sum(slot.remembered for slot in slots)
    parts = {"used": used, "remembered": remembered, "free": whole - used - remembered}
    if past:
        parts = {"used": used, "free or remembered": whole - used}
    return {name: round(100 * rows / whole) for name, rows in parts.items()}


@pytest.fixture(scope="module")
def stage() -> Stage:
    """A stage with finished and running requests."""
    stage = Stage(slots=4).load()
    stage.session.obey("/burst 12")
    stage.turns(60)
    assert stage.engine.sched.running and stage.state.history
    return stage


def test_the_pane_tells_the_truth_about_every_row(stage):
    engine = stage.state.view.engine
    said, wanted = shares(draw(stage.state)), truth(engine.slots, engine.limits.max_len)
    assert said == wanted and said["used"] > 0


def test_the_pane_goes_back_in_time_with_the_cursor(stage):
    """With the cursor in the past, the pane shows that step, and no share for what is unknown."""
    draw(stage.state)
    now = shares(draw(stage.state))
    stage.state.cursor = stage.state.history[0].step
    try:
        then = shares(draw(stage.state))
        wanted = truth(stage.state.slots(), stage.state.view.engine.limits.max_len, past=True)
    finally:
        stage.state.cursor = None
    assert then == wanted and then["used"] != now["used"]


def test_no_line_of_the_pane_is_longer_than_it(stage):
    for width in (*range(20, 60), 80, 120, 200):
        for height in (1, 2, 3, 4, 8, 20):
            lines = draw(stage.state, width, height)
            assert len(lines) <= height, (width, height)
            assert all(cell_len(line) <= width for line in lines), (width, height, lines)


def test_the_pane_is_empty_handed_before_anything_ran():
    """Before the first step nothing is used, and nothing is divided by zero."""
    assert shares(draw(Stage(slots=2).load().state)) == {"used": 0, "remembered": 0, "free": 100}


def test_v_leads_to_the_pane():
    check_there_is_a_pane()
    if "memory" not in layout.CHARTS:
        not_done('screen/draw/layout.py: CHARTS has no "memory"')
    if "memory" not in layout.LOWER:
        not_done(
            "screen/draw/layout.py: LOWER has no longer the names of CHARTS: v does not lead there"
        )
    assert "memory" in layout.arrange(80, 24, 4, "memory") and "memory" in layout.arrange(
        160, 50, 4, "memory"
    )
