"""The same prompt alone and among neighbours: what is counted, reported and restored."""

import random
from functools import cache

import pytest
from screen_stage import (
    Stage,
    draft_at_random,
    drawn,
    like_golden,
    on_screen,
    plain,
    turned_by_company,
)

import llama
from benchmarks.answer_diff import Bits
from experiments import same_answer
from experiments.same_answer import SameAnswerRecord
from nanobatch import Engine
from screen import commands, workload
from screen.draw import style
from screen.workload import BURST
from tui import MENU

SHORT = "Tell me a story about a fox."


def gathered(stage: Stage, order: str = f"/same 30 {SHORT}") -> SameAnswerRecord:
    stage.obey(order)
    stage.turns()
    stage.finish()
    assert stage.state.faults == []
    return stage.state.view.record


def test_a_batch_invariant_engine_has_one_answer(stage):
    found = gathered(stage)
    assert found.stage == "over" and found.so_far == "30 runs, 1 answer"
    assert [kind.count for kind in found.kinds] == [30] and found.unlike == 0
    assert len({run.digest for run in found.runs} | {found.alone.digest}) == 1
    assert found.alone.numbers == 2 * len(found.alone.tokens) == 2 * same_answer.LONGEST


def test_neighbours_come_go_and_are_cancelled(stage):
    """Some runs use cached rows, up to half of the runs have drafts, and all give the same answer."""
    draft_at_random(stage.engine, random.Random(1))
    found = gathered(stage, "/same 60")
    assert found.so_far == "60 runs, 1 answer"
    assert found.came > 20 and found.cancelled > 3 and found.beside == 7
    beside = [run.beside for run in found.runs]
    assert min(beside) < 6 < max(beside)
    assert {request.reason for request in stage.state.ended} == {"length", "cancelled"}
    taken = [run.reused for run in found.runs if run.reused]
    assert 10 < len(taken) < 50
    assert max(taken) < found.prompt_tokens == max(len(prompt) for prompt, _ in BURST)
    assert f"{60 - len(taken)} runs computed all rows" in found.beginnings
    drafted = [run for run in found.runs if run.draft_tokens]
    right = sum(run.accepted_tokens for run in drafted)
    assert 12 <= len(drafted) <= 30 and 0 < right < sum(run.draft_tokens for run in drafted)
    assert f"in {len(drafted)} of 60 runs: " in found.drafts
    assert f"{right:,} accepted" in found.drafts


def test_different_tokens_are_two_answers(stage):
    turned = turned_by_company(stage, 6, "token")
    found = gathered(stage)
    right, wrong = found.kinds
    assert found.texts == found.bits == 2
    assert wrong.count == len(turned) == found.unlike > 0 and right.count == 30 - len(turned)
    assert wrong.difference.place == wrong.difference.parted == 5
    assert wrong.difference.said == ("“ was”", "“ wolf”")
    assert f"{wrong.count} unlike the run alone" in found.so_far
    assert "token 6 is “ wolf”, alone it is “ was”" in " ".join(plain(page(stage, 120, 40)))


def test_different_bits_are_one_answer_by_tokens(stage):
    """Runs with the same tokens but different bits count as one answer by tokens, and as two by bits."""
    turned = turned_by_company(stage, 4, "bits")
    found = gathered(stage)
    assert (found.texts, found.bits) == (1, 2) and found.unlike == len(turned) > 0
    (unlike,) = same_answer.unlike(found)
    assert unlike.difference == same_answer.Difference(5, 2**-20, None, ("", ""))


def answer(*words: str, by: float = 0.0) -> Bits:
    likely = tuple(((len(word), -0.5 - by * i), (99, -1.0)) for i, word in enumerate(words))
    return Bits(f"{words}{by}", tuple(map(len, words)), likely, words)


def test_a_difference_says_where_and_by_how_much():
    right = answer("a", "bb", "ccc", "dddd")
    assert same_answer.difference(right, right) is None
    alike = same_answer.difference(right, answer("a", "bb", "ccc", "dddd", by=0.25))
    assert alike == same_answer.Difference(1, 0.75, None, ("", ""))
    other = same_answer.difference(right, answer("a", "bb", "xxxxx", "dddd", by=0.25))
    assert other == same_answer.Difference(1, 0.25, 2, ("“ccc”", "“xxxxx”"))
    shorter = same_answer.difference(right, answer("a", "bb"))
    assert shorter == same_answer.Difference(2, 0.0, 2, ("“ccc”", "nothing more"))
    assert same_answer.difference(answer("a", "bb"), right).said == ("nothing more", "“ccc”")


# --- with a model -------------------------------------------------------------------------------


@cache
def demo_stage(**options) -> Stage:
    stage = Stage()
    options |= {"slots": 8, "max_len": 400, "chunk": 64}
    stage.load_engine = lambda report, clock: Engine.load("demo", **options)
    return stage.load()


def test_the_demo_has_one_answer():
    stage = demo_stage()
    found = gathered(stage, "/same 24 Tell me a story about a fox and a lantern. It is late.")
    assert len(found.runs) == 24 and found.exact == stage.engine.is_batch_invariant
    assert found.alone.numbers == 6 * len(found.alone.tokens) >= 60
    assert len({value for place in found.alone.likely for _, value in place}) > 40
    if found.exact:
        assert found.so_far == "24 runs, 1 answer"


def test_a_reach_that_shows_is_reported(monkeypatch):
    attention = llama.attention

    def a_reach_that_shows(q, k, *rest):
        return attention(q, k, *rest) * (1 + k.shape[2] * 1e-5)

    monkeypatch.setattr(llama, "attention", a_reach_that_shows)
    found = gathered(demo_stage(attention="plain"), "/same 12 Tell me a story about a fox.")
    assert found.unlike > 0 and max(kind.difference.by for kind in same_answer.unlike(found)) > 1e-7


# --- start and end ------------------------------------------------------------------------------


def test_the_run_alone_is_really_alone(stage):
    stage.obey("/burst 3")
    stage.turns(5)
    stage.obey(f"/same 10 {SHORT}")
    stage.turns(3)
    assert stage.state.view.record.stage == "waits"
    while stage.state.view.record.stage == "waits":
        stage.turns()
    turned = turned_by_company(stage, 2, "token")
    stage.obey("an intruder")
    while stage.state.view.record.stage == "alone":
        stage.turns()
    assert len(turned) == 1 and "wolf" not in stage.state.view.record.alone.text
    stage.obey("/cancel all")
    stage.finish()


@pytest.mark.parametrize("when", ["waits", "alone", "runs"])
def test_ending_it_cancels_its_requests(when, stage):
    stage.obey("/burst 3")
    stage.turns(5)
    stage.obey(f"/same 20 {SHORT}")
    stage.turns()
    while stage.state.view.record is None or stage.state.view.record.stage != when:
        stage.turns()
    stage.turns(20 if when == "runs" else 2)
    stage.obey("/cancel all")
    stage.turns(3)
    assert not stage.state.view.busy and stage.engine.prefix_cache and not stage.client.own
    assert stage.state.view.record.stage == when
    assert gathered(stage, f"/same 5 {SHORT}").so_far == "5 runs, 1 answer"


def test_it_ends_the_slow_motion_of_a_first_burst(stage):
    """Regression: at sixteen steps a second, 200 runs took minutes."""
    stage.session.eases = True
    stage.obey("/burst 3")
    stage.turns(2)
    assert stage.state.view.slow
    stage.obey(f"/same 5 {SHORT}")
    stage.turns(2)
    assert stage.state.view.slow == 0 and stage.state.view.experimenting


def test_an_experiment_is_one_busy_period(stage):
    """Regression: the runs alone, those among neighbours, and each compared request were separate periods."""
    stage.obey("/burst 3")
    stage.finish()
    gathered(stage, f"/same 9 {SHORT}")
    stage.obey("/break client")
    stage.finish()
    stage.obey("/burst 3")
    stage.finish()
    ran = [period.requests for period in reversed(stage.state.periods)]
    assert [ran[0], ran[1], ran[3]] == [3, 2 * 12, 3] and ran[2] > 12


def test_a_run_that_is_cancelled_by_hand_is_run_again(stage):
    stage.obey(f"/same 10 {SHORT}")
    cancelled = 0
    while cancelled < 5:
        stage.turns()
        runs = [h for h in stage.client.own.values() if h.origin.prompt == SHORT]
        if stage.state.view.record.stage == "runs" and runs:
            stage.obey(f"/cancel {runs[0].id}")
            cancelled += 1
    stage.finish()
    assert stage.state.view.record.so_far == "10 runs, 1 answer"


def test_a_failed_run_ends_the_experiment(stage):
    stage.obey(f"/same 50 {SHORT}")
    sched = stage.engine.sched
    while len(sched.running) < sched.slots or not sched.waiting:
        stage.turns()
    stage.engine.runner.fail = RuntimeError("the device is on fire")
    while stage.state.view.experimenting:
        stage.turns()
    stage.turns()
    assert not sched.waiting and not sched.running
    faults = " ".join(fault.message for fault in stage.state.faults)
    assert "a run failed: RuntimeError: the device is on fire" in faults
    assert not stage.state.view.experimenting and stage.engine.prefix_cache


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 1}, "one slot has no neighbours"),
        ({"policy": "serial"}, "under serial each request runs alone"),
    ],
)
def test_one_slot_is_refused(options, words):
    stage = Stage(**options).load()
    stage.obey("/same 5")
    stage.turns(2)
    assert words in stage.state.faults[-1].message and not stage.state.view.experimenting


def test_a_wrong_number_of_runs_is_refused(stage):
    with pytest.raises(ValueError, match="same = "):
        stage.obey("/same 1001")


# --- the page -----------------------------------------------------------------------------------


@on_screen((120, 40))
async def test_the_page_is_as_drawn(it):
    it.stage.engine.is_batch_invariant = False
    it.stage.engine.summary = "8 slots; rows (avx2, 2 threads)"
    turned_by_company(it.stage, 7, "token")
    await it.press("a")
    while not it.state.view.record or len(it.state.view.record.runs) < 120:
        it.stage.turns()
    await it.turns(1)
    like_golden("same-two-120x40", it.text())


@on_screen()
async def test_a_opens_the_page_and_X_ends_the_experiment(it):
    assert "a runs a prompt alone" in "".join(plain(page(it.stage, 80, 24)))
    await it.press("a", turns=30)
    assert "The same answer among neighbours" in it.text() and "X ends it" in it.text()
    await it.turns(100)
    assert " of 200 runs, 1 answer" in it.text()
    runs = len(it.state.view.record.runs)
    await it.press("escape", turns=100)
    assert "Slots" in it.text()
    await it.press("a", turns=30)
    assert "The same answer" in it.text() and len(it.state.view.record.runs) > runs
    await it.press("X", turns=3)
    assert "and then it was ended" in it.text() and not it.state.view.busy
    await it.press("escape")
    it.app.action_command("/same last")
    await it.sees("and then it was ended")


def page(stage: Stage, width: int, height: int) -> list[style.Line]:
    return drawn(MENU.pages["same"].draw, stage.state, width, height)


def test_the_log_has_only_the_result():
    stage, lines = Stage().load(), []
    log = commands.PlainLog(stage.session, lines.append)
    log.obey(f"/same 9 {SHORT}")
    while not stage.session.settled:
        stage.client.loop.turn()
        log.refresh()
    told = [line for line in lines if " s  " not in line]
    assert (
        told[0].startswith("── The same answer among neighbours") and told[1] == " 9 runs, 1 answer"
    )
    assert not any("waits:" in line or "admitted" in line for line in lines)
    assert workload.Settings().ask("x").mute is False
