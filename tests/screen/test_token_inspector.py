"""The screen shows which tokens a grammar forbids, and a key asks for JSON."""

import json

from jsonschema import validate
from rich.style import Style
from screen_stage import Stage, plain, show

from engine.snapshot import Metrics, RequestView
from nanobatch import Engine, SamplingParams
from screen.draw import answers, style
from screen.draw.canvas import Canvas
from screen.workload import CANDIDATES, SCHEMA

METRICS = Metrics(None, None, None, None, None, None, 3, 0, 2)


def test_forbidden_tokens_are_struck_through():
    seen = (('"', 1.0, True), (" go", 0.79, False), ("\n", 0.06, True), ("best", 0.05, False))
    request = RequestView(1, "p", "", None, "", 0, 0.0, METRICS, candidates=seen)
    (line,) = answers.draw_token_inspector(request, Canvas(style.DARK, 32, 1))
    assert plain([line]) == ['✓" 100%  │ ✗␣go 79%  ✓\\n 6%  ']
    struck = [
        segment.text
        for segment in line
        if isinstance(segment.style, Style) and segment.style.strike
    ]
    assert struck == ["✗␣go 79%"]
    assert answers.draw_token_inspector(request, Canvas(style.DARK, 5, 1)) == []


def test_the_view_has_the_candidates_of_each_token():
    """In each view the newest token comes first and is allowed; the others are the most likely ones of the
    model."""
    with Engine.load("demo", slots=1, max_len=256, speculate=0) as engine:
        sampling = SamplingParams(max_tokens=150, grammar={"json": SCHEMA}, logprobs=CANDIDATES)
        handle = engine.submit(engine.text.ask("Tell me a story about a fox."), sampling)
        said, forbidden = "", 0
        while handle.finish_reason is None:
            before = len(handle.tokens)
            engine.step()
            candidates = handle.view().candidates
            if handle.finish_reason is None and len(handle.tokens) == before + 1:
                assert candidates[0][2] and CANDIDATES <= len(candidates) <= CANDIDATES + 1
                said += candidates[0][0]
                forbidden += not all(allowed for _, _, allowed in candidates)
        assert handle.finish_reason == "stop" and handle.text.startswith(said) and len(said) > 20
        assert forbidden > 10 and handle.view().candidates == ()
        validate(json.loads(handle.text), json.loads(SCHEMA))


class JsonStage(Stage):
    def load_engine(self, report, clock):
        return Engine.load("demo", clock=clock, slots=8, max_len=400, chunk=64)


def test_the_token_inspector_stays_in_sight_on_a_small_screen():
    """Regression: at 80x24 a step after `j` showed the plan instead, and the conversation hid the answer."""

    async def scenario(it):
        await it.press("space", "i", *"hello", "enter", "escape", "s", "s")
        await it.press("j", turns=3)
        for _ in range(6):
            await it.press("s", turns=3)
        assert it.state.lower == "streams" and it.state.selected == 1
        assert "slot 1 r2" in it.text() and "✓" in it.text() and "│ " in it.text()

    show(scenario, JsonStage())
