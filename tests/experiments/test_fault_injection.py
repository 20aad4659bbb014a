"""Inject faults into the engine: which requests fail, which continue, whose bits change, and what is
restored."""

from functools import cache
from types import SimpleNamespace

import pytest
from screen_stage import Stage, drawn, like_golden, on_screen, plain, turned_by_company
from word_engine import WordRunner

from experiments import fault_injection, step_cost
from experiments.fault_injection import BREAKS, FaultInjectionRecord
from kernels.c_attention import COperation
from nanobatch import Engine
from runner import Runner
from screen import commands
from screen.draw import step, style, timeline
from tui import MENU


def broken(stage: Stage, what: str) -> FaultInjectionRecord:
    stage.obey(f"/break {what}")
    stage.turns()
    stage.finish()
    found = stage.state.view.record
    assert found.stage == "over" and found.what == what, stage.state.faults
    assert not stage.state.view.busy and stage.engine.prefix_cache and not stage.client.own
    return found


@cache
def demo_stage() -> Stage:
    stage = Stage()
    stage.load_engine = lambda report, clock: Engine.load("demo", slots=4, max_len=400, chunk=64)
    return stage.load()


@pytest.fixture
def demo(monkeypatch) -> Stage:
    monkeypatch.setattr(fault_injection, "LONGEST", 12)  # shorter answers
    stage = demo_stage()
    stage.state.faults.clear()
    return stage


def test_a_nan_ends_one_request_on_a_real_model(demo):
    found = broken(demo, "nan")
    assert len(found.witnesses) == 8 and sum(each.went_on for each in found.witnesses) == 7
    (victim,) = found.ended
    assert victim.where.startswith("slot")
    assert victim.error.startswith("the model computed a number that is not finite")
    assert all(each.covers == 6 * each.tokens > 0 for each in found.witnesses)
    if demo.engine.is_batch_invariant:
        assert not found.changed and "no bit changed" in found.so_far
    assert type(demo.engine.runner) is Runner
    # The NaN starts after the prompt, because other requests may reuse the prompt's rows
    first = int(found.did.split("rows ")[1].split(" ")[0])
    prompts = {r.id: r.metrics.prompt_tokens for r in demo.state.ended}
    assert first == prompts[victim.id]


def test_a_nan_that_spreads_is_reported(demo, monkeypatch):
    """If attention reads all slots, a NaN in one of them ends every decoding request."""
    run = COperation.run

    def nosy(self, layer, q):
        return run(self, layer, q) + 0 * self.slab.arrays[layer][:, :, :-1].sum()

    monkeypatch.setattr(COperation, "run", nosy)
    found = broken(demo, "nan")
    assert len(found.ended) > 1 and found.so_far.startswith(f"{len(found.ended)} ended by it")


# --- with a word engine -------------------------------------------------------------------------


def test_an_exception_ends_only_the_requests_in_its_step(stage):
    found = broken(stage, "step")
    assert len(found.witnesses) == 12
    assert [each.id for each in found.ended] == [1, 2, 3, 4, 5, 7, 8]
    half_read = found.witnesses[5]
    assert half_read.where == "slot 5" and half_read.went_on, "it went back to the line"
    assert found.so_far == "7 ended by it, 5 went on to the end of their answers; no bit changed"
    assert found.did.startswith("step ") and type(stage.engine.runner) is WordRunner


@on_screen((120, 40))
async def test_the_planted_traceback_is_on_the_page_of_errors(it):
    await it.press("K")
    assert "an exception in the next step" in it.text()
    await it.press("1", turns=60)
    assert "ended by it" in it.text()
    await it.press("E")
    await it.sees("experiments.fault_injection.Planted: planted by /break step")
    assert "fault_injection.py" in it.text()
    assert not it.state.faults, "what is meant needs no notices over the page"


def test_a_users_requests_are_the_witnesses_if_there_are_enough(stage):
    stage.obey("/set max=60 temperature=0.9")
    for i in range(10):
        stage.obey(f"prompt {i}")
    stage.turns(6)
    found = broken(stage, "client")
    assert [each.id for each in found.witnesses] == [*range(1, 11)]
    assert len(found.ended) == 1 and found.ended[0].reason == "cancelled"
    assert all(each.covers == 0 for each in found.witnesses) and not found.changed, "tokens alone"
    again = [stage.prompt(request.id) for request in stage.state.ended[-10:]]
    assert sorted(again) == sorted(f"prompt {i}" for i in range(10)), "they were “token ids”"
    page = " ".join(plain(draw(stage, 80, 24)))
    assert "✓ all tokens" in page


@pytest.mark.parametrize(("wrong", "words"), [("bits", "✗ other bits"), ("token", "✗ other words")])
def test_changed_answers_are_reported(wrong, words, stage):
    stage.engine.is_batch_invariant = False
    turned_by_company(stage, 5, wrong)
    found = broken(stage, "client")
    changed = found.changed
    assert changed and f"{len(changed)} changed in a bit" in found.so_far
    page = " ".join(plain(draw(stage, 120, 40)))
    assert page.count(words) == len(changed) and "is not batch-invariant" in page


@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("turns", [2, 40])
def test_what_is_broken_is_put_back_when_it_is_ended(what, turns):
    stage = with_slab(Stage().load())
    runner = stage.engine.runner
    stage.obey(f"/break {what}")
    stage.turns(turns)
    assert stage.state.view.experimenting
    stage.obey("/cancel all")
    stage.turns(3)
    assert not stage.engine.has_work and stage.engine.runner is runner
    assert not stage.state.view.experimenting
    stage.obey("a request")
    stage.finish()
    assert stage.state.ended[-1].reason == "length"


def with_slab(stage: Stage) -> Stage:
    """Add a slab to the word runner. After a NaN is written into a slot, its next token is invalid."""
    runner = stage.engine.runner
    poisoned = set()

    class Rows:
        def __setitem__(self, where, number):
            assert number != number

    finish = runner.start_sampling

    def sick(flight, picks):
        flight = finish(flight, picks)
        for slot in poisoned & {slot for slot, (pick,) in picks.items() if pick.index}:
            flight.tokens[slot] = [-1]
            poisoned.discard(slot)
        return flight

    runner.slab = SimpleNamespace(
        prefix=lambda slot, rows: [Rows()],
        fill=lambda slot, rows: poisoned.add(slot),
        check=lambda: None,
    )
    runner.start_sampling = sick
    return stage


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (["/break"], "break what? /break step, nan, client"),
        (["/break it"], "break = 'it'; choose one of step, nan, client"),
        (["/break nan"], "this engine has no slab"),
    ],
)
def test_what_cannot_be_broken_is_refused_in_a_line(orders, words, stage):
    lines = []
    log = commands.PlainLog(stage.session, lines.append)
    for order in orders:
        log.obey(order)
        stage.turns(30)
    said = " ".join([*lines, *(fault.message for fault in stage.state.faults)])
    assert words in said and not stage.state.view.experimenting


# --- the page -----------------------------------------------------------------------------------


def draw(stage: Stage, width: int, height: int) -> list[style.Line]:
    return drawn(MENU.pages["break"].draw, stage.state, width, height)


@on_screen((120, 40))
async def test_the_page_is_as_drawn(it):
    it.stage.engine.is_batch_invariant = True
    await it.press("K", "1")
    it.stage.finish()
    await it.turns(1)
    like_golden("break-step-120x40", it.text())


@on_screen()
async def test_the_page_before_any_fault(it):
    await it.press("K")
    text = it.text()
    for title, _ in BREAKS.values():
        assert title in text
    assert "1 to 3 break it" in text
    row = next(i for i, line in enumerate(text.split("\n")) if "client that" in line)
    await it.pilot.click("#sheet", offset=(8, row))
    await it.turns(30)
    assert it.state.view.record.what == "client"
    await it.press("K")
    assert "Slots" in it.text(), "its own key closes it, and does not end the experiment"
    assert it.state.view.experimenting
    await it.press("K", "2", turns=2)
    assert "another experiment is running" in it.state.faults[-1].message
    await it.press("X", turns=3)
    assert not it.state.view.busy


def test_a_failed_step_fills_its_column(stage):
    """Regression: step numbers went from 7 to 9, and nothing showed that step 8 had failed."""
    broken(stage, "step")
    failed = [c for c in stage.state.history if c.cells[0].kind == style.FAILED]
    assert len(failed) == 1 and failed[0].step in range(2, 30)
    stage.state.look_at(stage.state.index_of(failed[0].step))
    text = "\n".join(stage.lines(timeline.draw_timeline, 100, 10))
    assert sum("✗" in line for line in text.splitlines()[1:-1]) == 8 and "✗failed" in text
    assert "This step failed" in "".join(stage.lines(step.draw_step, 80, 10))
    assert "This step failed" in "".join(stage.lines(step_cost.draw, 80, 24))
    steps_seen = [column.step for column in stage.state.history]
    assert steps_seen == [*range(steps_seen[0], steps_seen[-1] + 1)], "no number is left out"
