"""The cost of a step: bytes, arithmetic and Python time, and the machine's roofline."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
from screen_stage import Stage, like_golden, on_screen, show
from word_engine import VIEW

from engine import roofline
from experiments import step_cost
from models.forward_cost import Member, ModelCost, Roof, Work, pass_cost
from screen.commands import PlainLog, orders_of
from screen.remote_client import RemoteEngineClient
from tui import MENU

ROOF = Roof(reading=10e9, again=10e9, multiplying=100e9)
# Numbers that are easy to add up
MODEL = ModelCost(
    form="float32",
    layers=3,
    body_nbytes=1_000,
    body_products=250,
    tail_nbytes=400,
    tail_products=100,
    token_nbytes=8,
    row_nbytes=48,
    last_row_nbytes=16,
    width=12,
    last_width=4,
)
EXPERTS = MODEL._replace(experts=8, taken=2, expert_nbytes=60, expert_products=15)


@pytest.fixture(autouse=True)
def roof(monkeypatch) -> None:
    """Make this machine as fast as `ROOF` says."""
    monkeypatch.setattr(roofline, "measure", lambda nbytes, dtype: ROOF[:3])


def ready(**options) -> Stage:
    return Stage(**options).load()


def page(stage: Stage, width: int = 120, height: int = 40) -> str:
    return "\n".join(stage.lines(step_cost.draw, width, height))


# --- the sum


def test_a_step_is_added_up_as_by_hand():
    """Two sequences decode at 10 and 20 rows, and a chunk of 5 tokens ends its prompt."""
    work = Work.from_members([Member(1, 1, 10), Member(2, 1, 20), Member(3, 5, 5)], asked=3)
    assert work == Work(tokens=7, rows=35, looks=55, asked=3, sequences=3)
    found = pass_cost(MODEL, work)
    assert found.weights == 1_000 + 400 + 7 * 8
    assert found.keys == 35 * 3 * 16
    assert found.products == 2 * (7 * 250 + 3 * 100)
    assert found.attention == 4 * 55 * 3 * 4


def test_a_middle_chunk_reads_no_head():
    found = pass_cost(MODEL, Work.from_members([Member(1, 5, 5)], asked=0))
    assert (found.weights, found.keys) == (1_000 + 5 * 8, 5 * 2 * 16)
    assert (found.products, found.attention) == (2 * 5 * 250, 4 * 25 * 2 * 4)


def test_states_are_read_and_written_once_for_each_sequence():
    model = MODEL._replace(state_nbytes=100, state_products=7)
    work = Work.from_members([Member(1, 4, 10), Member(2, 1, 20)], asked=2)
    found, without = pass_cost(model, work), pass_cost(MODEL, work)
    assert found.nbytes == without.nbytes + 2 * 100
    assert found.operations == without.operations + 2 * 5 * 7


def test_experts_are_counted_or_expected():
    """In the last layer only the tokens in `asked` use experts."""
    work = Work(tokens=3, rows=3, looks=3, asked=1)
    known = pass_cost(EXPERTS, work, experts=[4, 5, 2])
    assert known.weights == 1_000 + 400 + 3 * 8 + 11 * 60
    drafted = pass_cost(EXPERTS, work)
    chance = 8 * (1 - 0.75**3)
    assert drafted.weights == pytest.approx(1_424 + (2 * chance + 2) * 60)
    assert known.products == drafted.products == 2 * (3 * 250 + 100 + (3 + 3 + 1) * 2 * 15)


# --- what bounds a step


class Took:
    """A step's duration, and the part of it that is Python."""

    def __init__(self, seconds: float, python_s: float):
        self.seconds = seconds
        self.python_s = python_s


@pytest.mark.parametrize(
    ("seconds", "python", "roof", "words"),
    [
        (
            8.0,
            1.0,
            Roof(1, 1, 1e9),
            "Reading bounds it: 0.00 kB/s, 75 % of what memory yields.",
        ),
        (8.0, 1.0, Roof(100, 100, 1), "Arithmetic bounds it: by the roofline that takes 50 %"),
        (8.0, 5.0, Roof(2, 2, 1e9), "Python is most of it: 62 %. The roofline would allow 3.00 s."),
        (
            8.0,
            1.0,
            Roof(3, 3, 2),
            "None of the three bounds it: reading is 25 %, arithmetic 25 %, Python 12 %. The",
        ),
        (5.0, 0.1, Roof(1, 1, 1e9), "It was quicker than the roofline allows (6.00 s)"),
        (
            5.0,
            0.1,
            Roof(1, 2, 1e9),
            "It read 0.00 kB/s, more than memory yields: the weights are in",
        ),
        (5.0, 0.1, Roof(1, 2, 1e9, others=1), "Reading bounds it: 0.00 kB/s, 60 % of what"),
        (5.0, 0.1, Roof(), ""),
    ],
)
def test_what_bounds_a_step_is_said_in_a_sentence(seconds, python, roof, words):
    """The step has six bytes and four operations."""
    step = step_cost.StepCost(tokens=1, weights=5, keys=1, products=3, attention=1)
    said = step_cost.what_bounds(step, Took(seconds, python), roof)
    assert words in said and bool(words) == bool(said), said
    assert ("cache" in said) == ("quicker" in words or "more than memory" in words)


# --- the page


def test_the_bill_is_as_drawn():
    async def scenario(it):
        it.stage.obey("/set max=9")
        it.stage.obey("a prompt alone")
        it.stage.finish()
        it.stage.obey("/set max=320")
        it.stage.obey("/burst 20")
        await it.turns(70)
        await it.press("B")
        await it.turns(5)
        like_golden("step-cost-120x40", it.text())

    stage = ready()
    show(scenario, stage, (120, 40), load=False)


@on_screen(make=ready, load=False)
async def test_the_arrows_lead_to_other_steps_and_s_takes_one(it):
    it.stage.obey("/burst 4")
    await it.turns(30)
    await it.press("space", "B")
    newest = it.state.history[-1].step
    assert f"The cost of step {newest:,}" in it.text()
    await it.press("left", "left")
    assert f"The cost of step {newest - 2:,}" in it.text()
    await it.press("s", turns=2)
    assert f"The cost of step {newest + 1:,}" in it.text() and "behind" not in it.text()
    await it.press("B")
    assert "Slots" in it.text()


def test_the_roofline_is_measured_once_off_the_clock(monkeypatch):
    """The measurement takes as long as a hundred steps, which must not count as waiting time of a request.
    The step in flight is read first, so its time does not include the measurement."""
    stage = ready()
    measured = []

    def measure(nbytes, dtype) -> tuple[float, ...]:
        assert not stage.engine._in_flight
        stage.time.now += 5.0
        measured.append(stage.time.now)
        return ROOF[:3]

    monkeypatch.setattr(roofline, "measure", measure)
    stage.obey("/burst 9")
    stage.turns(5)
    assert stage.engine._in_flight, "the engine runs ahead"
    stage.obey("/cost")
    stage.turns(1)
    stage.obey("/cost")
    stage.finish()
    assert len(measured) == 1
    assert max(column.view.seconds for column in stage.state.history) < 0.1
    assert max(r.metrics.ttft_s for r in stage.state.ended) < 3
    stage.obey("/cost again")
    stage.finish()
    assert len(measured) == 2
    with pytest.raises(ValueError, match="the only argument is again"):
        stage.obey("/cost twice")


def test_a_roofline_measured_next_to_other_programs(monkeypatch):
    stage = ready()
    stage.client.others.used_cores = lambda: 1.4
    monkeypatch.setattr(roofline, "measure", lambda nbytes, dtype: (5e9, 10e9, 100e9))
    stage.obey("alone")
    stage.turns()
    stage.obey("/cost")
    stage.finish()
    stage.state.move(-3)
    text = page(stage)
    roof = "arithmetic 100 GFLOP/s; the weights once more 10.0 GB/s; other programs took 1.4 cores"
    assert f"{roof} then: /cost again" in " ".join(text.split())
    assert "cache" not in text and "Reading bounds it" in text
    stage.client.others.used_cores = lambda: 0.0
    stage.turns()
    stage.obey("/cost again")
    stage.turns()
    text = page(stage)
    assert "; the model fits a cache, which yields 10.0 GB/s" in text
    assert "more than memory yields: the weights are in a cache" in " ".join(text.split())


# --- experts


def expert_stage() -> Stage:
    """Return a stage whose tokens use experts 0 and 1, or 1 and 2, in turn."""
    stage = ready()
    model = VIEW._replace(experts=8, taken=2, expert_nbytes=500_000, expert_products=125_000)
    stage.engine.registry.model = model
    stage.asked = []

    def read() -> list[Counter]:
        stage.asked.append(stage.engine.sched.steps)
        decode = sum(slot.request is not None for slot in stage.engine.snapshot().slots)
        layer = Counter({1: decode, 0: decode - decode // 2, 2: decode // 2})
        return [layer] * model.layers

    stage.engine.model.choices = SimpleNamespace(counts=read)
    return stage


async def looks(it) -> None:
    """Run three updates: the screen asks, the loop answers in its next turn, and the screen shows it."""
    for _ in range(3):
        await it.turns()


@on_screen((120, 40), make=expert_stage, load=False)
async def test_experts_are_asked_only_while_the_page_is_open(it):
    stage = it.stage
    stage.obey("/burst 3")
    await it.turns(20)
    assert not stage.asked and "experts" not in it.text()
    await it.press("space", turns=3)
    await it.press("B", turns=0)
    assert "expected: 3.50 a layer" in it.text()
    await looks(it)
    assert stage.asked == [stage.engine.sched.steps], "once for each step"
    await looks(it)
    assert len(stage.asked) == 1
    text = it.text()
    assert "read: 3.00 a layer (by chance 3.50)" in text, text
    assert "layer 0      3 of 8: 1 ×2, 0 ×1, 2 ×1" in text
    newest = stage.state.history[-1].step
    await it.press("left", turns=0)
    assert "expected: " in it.text() and "layer 0" not in it.text()
    await it.press("right", "s")
    await looks(it)
    assert stage.asked == [newest, newest + 1]
    assert "1 ×2, 0 ×1, 2 ×1" in it.text()
    await it.press("escape", "s")
    await looks(it)
    assert len(stage.asked) == 2


@on_screen((120, 40), make=expert_stage, load=False)
async def test_failed_questions_are_not_repeated(it):
    """If reading the experts fails, it is tried again at the next step, and not at each update, ten times a second."""
    stage = it.stage
    counts = stage.engine.model.choices.counts
    stage.engine.model.choices.counts = lambda: counts() / 0
    stage.obey("/burst 3")
    await it.turns(20)
    await it.press("space", "B", turns=3)
    for _ in range(3):
        await looks(it)
    assert len(stage.asked) == 1
    await it.press("s")
    await looks(it)
    assert len(stage.asked) == 2 and "expected: " in it.text()


# --- elsewhere


def test_a_watched_roofline_is_not_measured():
    stage = expert_stage()
    stage.obey("/burst 3")
    stage.turns(20)
    stage.session.client = RemoteEngineClient("127.0.0.1:1")
    stage.obey("/cost")
    stage.state.view = stage.state.view._replace(watches=True)
    text = page(stage)
    assert "not measured there" in text and "bounds" not in text
    assert "expected: 3.50 a layer (a watched engine does not tell which)" in text
    assert re.search(r"Python +1.00 ms", text) and "reading  " not in text


def test_the_log_has_the_cost_once_the_roofline_is_known():
    lines = []
    stage = ready()
    log = PlainLog(stage.session, lines.append)
    log.obey("/cost")
    assert not any("roof" in line for line in lines), "it waits for the measurement"
    stage.client.loop.turn()
    log.refresh()
    assert " roofline     memory 10.0 GB/s, arithmetic 100 GFLOP/s" in lines
    assert orders_of("burst3 cost", MENU, logged=True) == [("burst", "3"), ("cost", "")]
