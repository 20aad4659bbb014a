"""How the screen shows draft tokens: several tokens in a cell, rejected ones as waste, and their counts."""

import random

import pytest
from screen_stage import Stage, draft_at_random, drawn, plain

from experiments.step_cost import asked_of, parts_of
from nanobatch import SamplingParams
from screen.draw.step import draw_step
from screen.draw.timeline import draw_timeline
from screen.export_recording import record
from screen.pages.request_details import figures_of
from screen.timeline_columns import useful_of


def drafting(seed: int = 3) -> Stage:
    """Run two answers of 40 tokens with many draft tokens."""
    stage = Stage(slots=2).load()
    draft_at_random(stage.engine, random.Random(seed))
    for letter in (97, 98):
        stage.engine.submit([letter] * 20, SamplingParams(max_tokens=40, ignore_eos=True))
    return stage.finish()


def test_cells_show_the_tokens_of_draft_steps():
    stage = drafting()
    state = stage.state
    known = [column for column in state.history if column.view.drafts]
    assert len(known) > 5 and len(state.history) < 40, "answers took a step for each token"
    assert sum(column.tokens for column in state.history) == 80
    for column in known:
        step = column.view
        wrong = sum((of - right) / (1 + of) for _, of, right in step.drafts)
        working = len(step.decode) + len(step.prefill) - len(step.ghosts)
        assert column.useful == pytest.approx(working - wrong)
    assert useful_of(known) < 100
    for slot in (0, 1):  # the last token of an answer has no row
        assert max(column.rows[slot] for column in state.history) == 20 + 39
    picture = "\n".join(plain(drawn(draw_timeline, state, 120, 10)))
    assert "¹" in picture and "⁴" in picture, picture


def test_a_step_and_a_request_tell_of_draft_tokens_in_words():
    stage = drafting()
    state = stage.state
    column = next(
        c
        for c in state.history
        if c.view.accepted_tokens and c.view.draft_tokens > c.view.accepted_tokens
    )
    state.cursor = column.step
    step = column.view
    words = " ".join(" ".join(plain(drawn(draw_step, state, 200, 40))).split())
    assert f"drafted {step.draft_tokens}, {step.accepted_tokens} accepted (slot " in words
    assert f"{len(step.decode)} decode + {step.draft_tokens} drafted = " in words
    assert f" + {len(step.decode)} + {step.draft_tokens} drafted of " in words
    rows = (
        len(step.decode) + step.draft_tokens + sum(stop - start for *_, start, stop in step.prefill)
    )
    assert sum(part.tokens for part in parts_of(column)) == rows
    assert asked_of(step) == len(step.decode) + step.draft_tokens
    request = state.requests[1]
    m = request.metrics
    assert f"40 new tokens, drafted {m.draft_tokens}, {m.accepted_tokens} accepted" in figures_of(
        state, request, 9.0
    )


def test_steps_with_draft_tokens_are_recorded_as_they_were():
    state = drafting().state
    about = {"command": "", "version": "", "processor": "", "model": "words", "engine": ""}
    recording = record(state, about, lambda request: ())
    (run,) = recording["runs"]
    place = recording["fields"]["StepView"].index("drafts")
    told = [[list(one) for one in step.view.drafts] for step in state.history]
    assert [step[place] for step in run["steps"]] == told and any(told)
