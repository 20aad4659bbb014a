"""Pictures of the screen, compared as plain text with `golden/*.txt`: the main view at three sizes
(a fourth shows single panes), other pages at one.

After an intended change, run the tests with NANOBATCH_GOLDEN=write and review the diff.
"""

from collections import Counter
from itertools import product

import pytest
from rich.cells import cell_len
from screen_stage import Stage, drawn, like_golden, on_screen, plain, show
from textual import events
from textual.geometry import Region

from experiments import race
from screen import app, workload
from screen.draw import layout, style
from screen.pages import request_details
from tui import MENU


@pytest.mark.parametrize(
    "policy, width, height",
    [
        ("continuous", 60, 20),
        ("continuous", 120, 40),
        ("continuous", 200, 50),
        ("static", 120, 40),
    ],
)
def test_the_main_screen_in_mid_burst_is_as_drawn(policy, width, height):
    async def scenario(it):
        it.stage.obey("/burst 20")
        await it.turns(70)
        like_golden(f"main-{policy}-{width}x{height}", it.text())

    show(scenario, Stage(policy=policy), (width, height))


@on_screen(size=(120, 40))
async def test_the_screen_before_anything_has_run_is_as_drawn(it):
    like_golden("start-120x40", it.text())


@on_screen(size=(120, 40))
async def test_the_comparison_is_as_drawn(it):
    it.stage.obey("/burst 20")
    it.stage.finish()
    await it.press("c")
    like_golden("compare-120x40", it.text())


@on_screen(size=(120, 40))
async def test_the_lesson_is_as_drawn(it):
    it.stage.obey("/burst 40")
    await it.turns(250)
    while it.state.lower != "lesson":
        await it.press("v", turns=0)
    await it.turns(0)
    like_golden("lesson-120x40", it.text())


@pytest.mark.parametrize("lower", [name for name in layout.LOWER[:-1] if name != "lesson"])
@on_screen()
async def test_each_pane_of_a_small_screen_is_as_drawn(it, lower):
    it.stage.obey("/burst 12")
    await it.turns(40)
    while it.state.lower != lower:
        await it.press("v", turns=0)
    await it.turns(0)
    like_golden(f"pane-{lower}-80x24", it.text())


@on_screen(load=False)
async def test_loading_shows_stages_and_library_output(it):
    assert "starting" in it.text()
    it.stage.client._report("finding owner/name")
    it.app.poll()
    it.app.post_message(
        events.Print("\rmodel: 41%|████ | 12.3M/30.1M [00:04<00:06, 2.9MB/s]", True)
    )
    await it.pilot.pause()
    assert (
        "… finding owner/name" in it.text()
        and "12.3M/30.1M" in it.text()
        and "2.9MB/s" in it.text()
    )
    assert "Slots" not in it.text()
    it.stage.client.load()
    it.app.poll()
    await it.pilot.pause()
    assert "Slots" in it.text() and "finding" not in it.text()
    assert it.app.query_one(app.PromptBox).value == workload.BURST[0][0]


def test_an_engine_that_does_not_start_says_why():
    def load(report, clock):
        report("finding x")
        raise ValueError("x is cut off; download it again \x1b[31m")

    stage = Stage()
    stage.load_engine = load

    async def scenario(it):
        stage.client.load()
        it.app.poll()
        await it.pilot.pause()
        assert "x is cut off; download it again ␛[31m" in it.text()
        await it.pilot.press("b", "p", "c", "enter", "x", "q")
        assert it.app.return_code == 0

    show(scenario, stage, load=False)


@pytest.mark.parametrize("slots", [1, 3, 8, 40])
@pytest.mark.parametrize("width", range(60, 230, 34))
def test_panes_never_overlap_nor_leave_the_screen(width, slots):
    seen = 0
    for height in range(20, 70, 3):
        for lower, server in product(layout.LOWER, (False, True)):
            found = layout.arrange(width, height, slots, lower, server)
            if lower == "streams":
                chats = layout.arrange_chat(width, height, slots)
                check_places(chats, width, height)
            assert {"status", "slots", "prompt", "keys"} <= found.keys()
            drawn = layout.STACKS.get(lower, (lower,))
            assert drawn[0] in found or lower in ("streams", "timeline") or width >= 110
            charts = found.keys() & {"rate", "batch", "ttft", "batching"}
            # A lower chart would have little more than a title and an axis
            assert all(found[name].height >= 4 for name in charts)
            check_places(found, width, height)
            seen += len(found)
    assert seen > 500


def check_places(found, width, height):
    for name, region in found.items():
        assert Region(0, 0, width, height).contains_region(region), (name, region)
        assert region.width > 1 and region.height > 0, (name, region)
        for other, its in found.items():
            assert other == name or not region.overlaps(its), (name, other)


@pytest.mark.parametrize("slots", [3, 40])
def test_no_line_of_any_pane_is_longer_than_its_pane(slots):
    """No line is truncated, because a truncated number is misleading: 1799 becomes 179."""
    stage = Stage(slots=slots, policy="static").load()
    stage.obey("/burst 30")
    stage.session.has_chats = True
    stage.obey(
        '"日本語のテキスト 👩‍👩‍👧 [/foo] and_a_very_long_word_that_has_no_blank_in_it_at_all_and_goes_on_for_ever"'
    )
    panes = app.panes_of(MENU)
    seen = Counter()
    for _ in range(3):
        stage.turns(70)
        for lower, (width, height) in product(
            layout.LOWER, ((60, 20), (80, 24), (97, 31), (120, 40), (200, 50))
        ):
            found = layout.arrange(width, height, slots, lower, True)
            found |= layout.arrange_chat(width, height, slots)
            for name, region in found.items():
                if name != "prompt":
                    check_lines(
                        name,
                        drawn(panes[name], stage.state, region.width, region.height),
                        region,
                    )
                    seen[name] += 1
            for name in ("help", "requests"):  # these can be scrolled
                check_lines(
                    name,
                    drawn(MENU.pages[name].draw, stage.state, width, height),
                    Region(0, 0, width, 10_000),
                )
        lines = drawn(request_details.draw_request, stage.state, 74, 12)
        check_lines("requests", lines, Region(0, 0, 74, 12))
        seen["requests"] += 1  # with many slots, requests have no separate pane
        stage.obey("/compare")
        for width, height in ((60, 20), (80, 24), (120, 40), (200, 50)):
            lines = drawn(race.draw_comparison, stage.state, width, height)
            check_lines("contest", lines, Region(0, 0, width, height))
    assert seen.keys() == panes.keys() - {"loading", "small", "strip"} and min(seen.values()) >= 3


def check_lines(name: str, lines: list[style.Line], region: Region) -> None:
    assert len(lines) <= region.height, (name, region)
    for line in plain(lines):
        assert cell_len(line) <= region.width, (name, region, line)


@on_screen()
async def test_any_size_survives_and_below_60x20_is_a_line(it):
    it.stage.obey("/burst 20")
    for size in ((59, 24), (80, 19), (10, 3), (1, 1), (60, 20), (200, 60), (300, 20)):
        await it.pilot.resize_terminal(*size)
        await it.turns(2)
        text = it.text()
        assert ("60×20" in text) == (size[0] < 60 or size[1] < 20) or size[0] < 10, (size, text)
    await it.press("question_mark")
    for size in ((10, 3), (60, 20), (200, 60)):
        await it.pilot.resize_terminal(*size)
    assert it.app.is_running
