"""Engine clients: commands between steps, pause and speed, the steady load, prompts, and experiments."""

import random
import re
from collections import Counter
from dataclasses import dataclass

import pytest
from screen_stage import Stage, on_screen, show
from textual import events

from experiments.experiment import Experiment
from screen import commands, workload
from screen.commands import Session
from screen.draw import slots
from screen.engine_view import ExperimentRecord
from screen.remote_client import RemoteEngineClient
from screen.state import State
from tui import MENU


@pytest.mark.parametrize("line", ["/burst 6", "/load 5", "/race 6", "hello"])
def test_prompts_are_tokenized_in_the_callers_thread(stage, line):
    """Regression: a slow template delayed the steps of all requests."""
    read = []
    ask = stage.engine.text.ask
    stage.engine.text.ask = lambda prompt: read.append(prompt) or ask(prompt)
    stage.obey(line)
    before = list(read)
    assert before
    for _ in range(200):
        stage.time.now += 0.01
        stage.turns()
    assert stage.state.requests and read == before


def test_panes_agree_while_paused_and_stepping(stage):
    """Regression: the slots pane was one step ahead of the step pane, so a prompt of one chunk was never
    shown as prefill in its slot."""
    stage.engine.sched.budget = 16  # one chunk a step, so that many prompts are held
    stage.obey("/burst 20")
    stage.turns(3)
    stage.obey("/pause")
    stage.turns()
    seen = Counter()
    for _ in range(40):
        assert (
            stage.engine.registry.steps.count
            == stage.state.view.engine.planned
            == stage.state.history[-1].step
        )
        step = stage.state.step
        did = {slot: "prefill" for slot, *_ in step.prefill} | {
            slot: "decode" for slot, _ in step.decode
        }
        did |= {slot: "held" for slot, _ in step.held}
        lines = stage.lines(slots.draw_slots, 80, 11)[2:-1]
        for slot, line in zip(stage.state.view.engine.slots, lines, strict=True):
            if slot.request is not None:
                assert line[4:12].strip() == did[slot.slot], (line, step)
                seen[did[slot.slot]] += 1
        stage.obey("/step")
        stage.turns()
    assert min(seen["prefill"], seen["decode"], seen["held"]) > 10


def test_a_pause_reads_the_step_in_flight_first(stage):
    """The time of the step in flight is counted, too."""
    stage.obey("/burst 4")
    stage.turns(9)
    assert stage.state.view.engine.planned == stage.state.history[-1].step + 1
    stage.obey("/pause")
    stage.turns()
    newest, before = stage.state.history[-1], stage.state.history[-2]
    assert (
        newest.step == stage.state.view.engine.planned
        and newest.ended - before.ended >= 0.01 - 1e-9
    )
    assert stage.state.view.engine.now == newest.ended


def test_a_steady_load_lets_a_paused_loop_sleep(stage):
    """Regression: with a load on a paused clock, the loop was called again immediately, over and over."""
    stage.obey("/load 5")
    stage.turns()
    stage.obey("/pause")
    stage.turns()
    assert stage.client.loop.turn() is None
    stage.obey("/resume")
    stage.turns()
    assert stage.client.loop.turn() is not None
    stage.obey("a request")
    stage.obey("/slow 4")
    stage.turns()
    assert 0 < stage.client.loop.turn() <= 0.25


@on_screen()
async def test_only_the_first_burst_of_the_demo_runs_slowly(it):
    it.stage.session.eases = True
    await it.press("b", turns=2)
    assert it.state.view.slow == commands.SLOW
    assert f"slow: {commands.SLOW} steps/s" in it.text() and "0 full speed" in it.text()
    assert "0 Full speed" in it.text().splitlines()[-1]
    while not it.stage.session.settled:
        it.stage.time.now += it.stage.client.loop.turn() or 0
        it.stage.session.refresh()
    assert it.state.view.slow == 0
    await it.press("b", turns=3)
    assert it.state.view.slow == 0 and "running" in it.text()
    it.stage.session.eases = True
    for leave in (["0"], ["plus"] * 4):
        await it.press("b", *leave, turns=2)
        assert it.state.view.slow == 0


@on_screen()
async def test_minus_and_plus_change_the_speed(it):
    await it.press("minus")
    assert it.state.view.slow == 16
    await it.press("minus", "minus", "minus", "plus")  # faster than the view is updated
    assert it.state.view.slow == 4 and "slow: 4 steps/s" in it.text()
    assert "Full speed" in it.text().splitlines()[-1]
    await it.press("b", turns=2)
    assert it.state.view.slow == 4 and "slow: 4 steps/s" in it.text()
    await it.press("space", turns=2)
    assert "paused" in it.text() and it.state.view.slow == 4
    await it.press("space", "0")
    assert it.state.view.slow == 0 and "running" in it.text()
    it.app.action_command("/slow 0.05")
    await it.sees("slow = '0.05'")


def test_a_steady_load_comes_at_its_rate_and_stops(stage):
    stage.obey("/load 5")
    stage.client.loop.turn()
    for _ in range(400):  # 20 seconds
        stage.time.now += 0.05
        stage.turns()
    assert 60 < stage.engine.sched.submitted < 140
    stage.obey("/load off")
    stage.turns()
    count = stage.engine.sched.submitted
    stage.time.now += 100
    stage.turns(10)
    assert stage.engine.sched.submitted == count and count > 0


@on_screen(size=(120, 40))
async def test_a_refused_prompt_comes_back_into_the_box(it):
    await it.press("i", *"xyz", turns=0)
    it.app.prompt.put("x" * 2600)
    await it.press("enter", turns=2)
    assert it.app.prompt.value == "x" * 2600
    await it.sees("not fired: the prompt has 2,600")
    said = "not fired: the prompt has 2,600 tokens, but a slot holds 512, prompt and answer together; shorten it"
    # It used to mention a max_tokens that no user had set
    assert it.state.faults[-1].message.startswith(said)
    # Ctrl-U deletes everything, so the cursor is at the end of the line
    await it.press("ctrl+u", turns=0)
    assert it.app.prompt.value == ""


def test_no_escape_sequence_and_no_markup_reaches_the_terminal():
    evil = '"\x1b]0;title\x07 \x1b[31mred\x9b2J [/foo] [b]x[/b] \u202eabc \r\x08 \x00"'

    async def scenario(it):
        it.stage.obey("/set max=30")
        it.stage.obey(evil)
        it.stage.client.loop.turn()
        it.stage.client.fault("fault " + evil)
        await it.turns(60)
        texts = [it.text()]
        await it.press("f")
        texts.append(it.text())
        it.app.post_message(events.Paste(evil))
        await it.press("escape", "i")
        await it.pilot.pause()
        it.app.post_message(events.Paste(evil))
        await it.pilot.pause()
        texts.append(it.text())
        for text in texts:
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), repr(text)
        assert "[/foo]" in texts[0] and "␛[31m" in texts[0]

    show(scenario, Stage(prompts=workload.BURST), size=(120, 40))


@dataclass(frozen=True)
class Seen(ExperimentRecord):
    """The record of a test experiment: the number of its requests that have ended."""

    name = "seen"
    ended: int


class Tried(Experiment):
    """An experiment whose steps are a generator function given by the test."""

    what = "experiment"

    def __init__(self, records):
        super().__init__(Seen(0))
        self.records = records

    def run(self):
        return self.records(self.client)


def test_an_experiment_advances_between_steps(stage):
    asks = stage_asks(3)

    def experiment(client):
        handles = [client.submit(ask) for ask in asks]
        while not all(handle.finish_reason for handle in handles):
            yield Seen(sum(handle.finish_reason is not None for handle in handles))
        yield Seen(len(handles))

    stage.session.run_experiment(Tried(experiment))
    found = []
    for _ in range(300):
        stage.turns()
        if (view := stage.state.view).record and view.record not in found:
            found.append(view.record)
        if not view.experimenting and found:
            break
    assert found[0] == Seen(0) and found[-1] == Seen(3) and not view.experimenting and not view.busy


@pytest.mark.parametrize("end", ["cancel", "mistake", "wrong"])
def test_an_experiment_that_is_cut_short_undoes_its_changes(stage, end, caplog):
    budget = stage.engine.sched.budget

    def experiment(client):
        client.engine.sched.budget = 1
        try:
            yield Seen(0)
            if end == "wrong":
                raise ValueError("this model has no room for it")
            if end == "mistake":
                raise KeyError("a mistake in an experiment")
            while True:
                yield Seen(1)
        finally:
            client.engine.sched.budget = budget

    stage.session.run_experiment(Tried(experiment))
    stage.turns(2)
    if end == "cancel":
        assert stage.engine.sched.budget == 1 and stage.state.view.experimenting
        stage.obey("/cancel all")
    stage.turns(3)
    assert stage.engine.sched.budget == budget and not stage.state.view.experimenting
    faults = " ".join(fault.message for fault in stage.state.faults)
    assert {"cancel": "", "wrong": "no room for it", "mistake": "a mistake in an experiment"}[
        end
    ] in faults
    stage.obey("/burst 2")
    stage.finish()


def test_an_experiment_is_refused_next_to_another_or_to_clients(stage):

    def experiment(client):
        while True:
            yield Seen(0)

    stage.session.run_experiment(Tried(experiment))
    stage.turns(2)
    stage.session.run_experiment(Tried(experiment))
    stage.turns(2)
    assert "another experiment is running" in stage.state.faults[-1].message
    for view in (
        stage.state.view._replace(watches=True),
        stage.state.view._replace(server=object()),
    ):
        stage.state.view = view
        with pytest.raises(ValueError, match="its clients would suffer"):
            stage.session.run_experiment(Tried(experiment))


def stage_asks(count: int) -> list[workload.Ask]:
    return [workload.Settings().ask(f"prompt {i}", 8) for i in range(count)]


def test_a_steady_load_that_fills_the_queue_is_turned_off(stage):
    """Regression: each refused prompt was reported as a separate fault for as long as the load went on."""
    stage.engine.sched.max_queue = 20
    stage.obey("/load 1000")
    for _ in range(100):
        stage.time.now += 0.05
        stage.turns()
    assert [fault.message for fault in stage.state.faults] == [
        "the steady load is off: the queue is full (20)"
    ]
    assert stage.state.view.load == 0 and len(stage.state.requests) == 20
    stage.finish()


@pytest.mark.parametrize("order", ["/same 5 hello", "/race 4"])
def test_a_steady_load_pauses_during_an_experiment(stage, order):
    """Regression: some experiments were refused under a load. After a race, all prompts that had been due
    in the meantime were sent at once."""
    stage.obey("/load 2")
    stage.turns()
    stage.obey(order)
    stage.turns(2)
    while stage.state.view.experimenting:
        stage.time.now += 1
        stage.turns()
    assert not stage.state.faults and stage.state.view.load == 2
    before = stage.engine.sched.submitted
    stage.turns(3)
    assert stage.engine.sched.submitted - before < 3
    for _ in range(30):
        stage.time.now += 0.2
        stage.turns()
    assert stage.engine.sched.submitted - before > 4


def test_ended_requests_are_dropped_from_our_own(stage):
    """Regression: after each step all of a client's requests were checked, so a step took a millisecond
    longer."""
    dice = random.Random(5)
    stage.obey("/burst 100")
    ended = 0
    for turn in range(150):
        stage.turns()
        if turn % 20 == 10:
            stage.obey(f"/cancel {dice.choice(list(stage.client.own))}")
        if turn == 80:
            stage.engine.runner.fail = RuntimeError("the device is on fire")
        open_ = {r.id for r in stage.state.requests.values() if r.reason is None}
        waiting = set(stage.engine.sched.waiting)
        assert set(stage.client.own) == open_ | waiting, turn
        ended = len(stage.state.ended)
    assert 8 < ended < 100
    stage.finish()
    assert not stage.client.own


def test_watchers_see_the_prompt_as_typed(stage):
    """Regression: a server's page and a remote screen showed "5 token ids" instead."""
    stage.obey("Hello")
    stage.turns()
    (request,) = stage.engine.snapshot().requests
    assert request.prompt == "Hello"


def test_a_watched_engine_obeys_or_refuses_each_command():
    """Regression: a command without its own method raised an AttributeError, and /json was refused."""
    session = Session(RemoteEngineClient("http://127.0.0.1:1"), State(), MENU)
    session.refresh()
    session.stays = True
    refused = set()
    for name, rest in MENU.commands.items():
        try:
            session.obey(f"/{name} {rest}")
        except ValueError as error:
            refused |= {name} if "only watches" in str(error) else set()
    assert refused == {"policy", "load", "pause", "resume", "step", "slow"}
    assert session.client.posted == 9  # /burst 8, and /json
