"""The cost of a step: bytes, arithmetic and Python, and the roof of the machine above them."""

import re
from types import SimpleNamespace

import pytest
from screen_stage import Stage, drawn, like_golden, plain, show
from word_engine import VIEW

from analysis.step_cost_model import Floors, Member, Work, floors_of, of_rows, pass_cost
from runtime.model_cost import ModelCost
from runtime.snapshot import ExpertsView, RanksView, Roof
from screen.commands import PlainLog, orders_of
from screen.draw.style import UNSEEN
from screen.pages import step_cost
from screen.remote_client import RemoteEngineClient
from screen.step_columns import gap

ROOF = Roof(reading=10e9, again=10e9, multiplying=100e9)
# Numbers that can be added up by heart
MODEL = ModelCost(
    form="float32",
    layers=3,
    body_nbytes=1_000,
    body_products=250,
    tail_nbytes=400,
    tail_products=100,
    token_nbytes=8,
    row_nbytes=16,
    width=4,
)
EXPERTS = MODEL._replace(experts=8, taken=2, expert_nbytes=60, expert_products=15)


def ready(**options) -> Stage:
    """A stage whose machine has been measured."""
    stage = Stage(**options).load()
    stage.client._measure_roofline = lambda others: setattr(stage.engine.registry, "roof", ROOF)
    return stage


def page(stage: Stage, width: int = 120, height: int = 40) -> str:
    return "\n".join(plain(drawn(step_cost.draw, stage.state, width, height)))


# --- the sum


def test_a_step_is_added_up_as_by_hand():
    """Two sequences decode, with 10 and 20 rows, and a chunk of 5 tokens ends its prompt at 5."""
    work = Work.of([Member(1, 1, 10), Member(2, 1, 20), Member(3, 5, 5)], asked=3)
    assert work == Work(tokens=7, rows=35, looks=55, asked=3)
    found = pass_cost(MODEL, work)
    assert found.weights == 1_000 + 400 + 7 * 8
    assert found.keys == 35 * 3 * 16
    assert found.products == 2 * (7 * 250 + 3 * 100)
    assert found.attention == 4 * 55 * 3 * 4


def test_a_middle_chunk_reads_no_head():
    found = pass_cost(MODEL, Work.of([Member(1, 5, 5)], asked=0))
    assert (found.weights, found.keys) == (1_000 + 5 * 8, 5 * 2 * 16)
    assert (found.products, found.attention) == (2 * 5 * 250, 4 * 25 * 2 * 4)


def test_weights_are_shared_and_keys_are_not():
    one = of_rows(MODEL, 1, 100)
    for rows in (2, 4, 8, 16):
        many = of_rows(MODEL, rows, 100)
        assert many.weights / rows == pytest.approx(1_400 / rows + 8)
        assert many.keys / rows == one.keys
        assert many.operations == rows * one.operations


def test_experts_are_counted_or_expected():
    """In the last layer only the tokens that are asked take any."""
    work = Work(tokens=3, rows=3, looks=3, asked=1)
    known = pass_cost(EXPERTS, work, experts=[4, 5, 2])
    assert known.weights == 1_000 + 400 + 3 * 8 + 11 * 60
    drafted = pass_cost(EXPERTS, work)
    chance = 8 * (1 - 0.75**3)
    assert drafted.weights == pytest.approx(1_424 + (2 * chance + 2) * 60)
    assert known.products == drafted.products == 2 * (3 * 250 + 100 + (3 + 3 + 1) * 2 * 15)


def test_a_small_model_has_the_roofline_of_the_cache():
    step = of_rows(MODEL, 1, 100)
    assert floors_of(step, Roof()) is None
    assert floors_of(step, Roof(100.0, 200.0, 10.0)) == Floors(
        step.nbytes / 200, step.operations / 10
    )
    assert floors_of(step, Roof(100.0, 50.0, 10.0)).reading == step.nbytes / 100


def test_it_is_said_with_how_many_rows_the_sum_turns():
    """A row of 100 brings 4,800 bytes of keys and values: more than the weights from the first on.
    Of rows of 1 it takes 35 (48 n >= 1400 + 8 n)."""
    long = step_cost.where_it_ends(MODEL, Roof(), 100)
    assert long == "The gain ends where these weigh more than the weights (from 1 row on)."
    assert "(from 35 rows on)" in step_cost.where_it_ends(MODEL, Roof(), 1)
    # n rows: (1400 + 56 n) / 100 seconds of reading, 748 n / 1000 of multiplying
    roof = Roof(100.0, 100.0, 1000.0)
    turns = next(n for n in range(1, 999) if (1400 + 56 * n) / 100 < 748 * n / 1000)
    assert step_cost.where_it_ends(MODEL, roof, 1) == (
        "The gain ends where these weigh more than the weights (from 35 rows on), "
        f"or where arithmetic takes longer than reading (from {turns} rows on)."
    )
    assert "arithmetic" not in step_cost.where_it_ends(MODEL, Roof(1.0, 1.0, 1e9), 1)
    tiny = MODEL._replace(row_nbytes=0)
    assert step_cost.where_it_ends(tiny, Roof(1.0, 1.0, 1e9), 1) == "Nothing ends that gain here."


# --- what bounds a step


class Took:
    """A step that took so long."""

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
            "Reading bounds it: by the roofline that takes 75 % of the time.",
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
        (5.0, 0.1, Roof(1, 2, 1e9, others=1), "Reading bounds it: by the roofline that takes 60 %"),
        (5.0, 0.1, Roof(), ""),
    ],
)
def test_what_bounds_a_step_is_said_in_a_sentence(seconds, python, roof, words):
    """Six bytes and four operations."""
    step = step_cost.StepCost(tokens=1, weights=5, keys=1, products=3, attention=1)
    said = step_cost.what_bounds(step, Took(seconds, python), roof)
    assert words in said and bool(words) == bool(said), said
    assert ("cache" in said) == ("quicker" in words or "more than memory" in words)


# --- the page


def test_the_bill_is_as_drawn():
    async def scenario(it):
        it.stage.session.obey("/set max=9")
        it.stage.session.obey("a prompt alone")
        it.stage.finish()
        it.stage.session.obey("/set max=320")
        it.stage.session.obey("/burst 20")
        await it.turns(70)
        await it.press("B")
        await it.turns(5)
        like_golden("step-cost-120x40", it.text())

    stage = ready()
    show(scenario, stage, (120, 40), load=False)


def test_the_page_tells_what_was_seen_and_nothing_else():
    stage = ready()
    stage.session.obey("alone")
    stage.finish()
    stage.session.obey("/cost")
    stage.turns()
    stage.state.move(-3)
    text = page(stage)
    (one,) = re.findall(r"^ +1 .*", text, re.M)
    assert "10.0 ms" in one, "a step of one row takes 10 ms"
    for rows in (2, 4, 8, 16):
        (line,) = re.findall(rf"^ +{rows} .*", text, re.M)
        assert line.split("│")[0].split()[-1] == "–" and line.split("│")[1].split()[4] == "–"
    assert f"{stage.state.here.rows[0]:,} rows of r1" in text
    assert f"{step_cost.scaled(VIEW.body_nbytes + VIEW.tail_nbytes + 1024, 'B')} of float32" in text
    # 64 MB at 10 GB/s, and a second of ten thousandths is Python's
    assert "Reading bounds it: by the roofline that takes 67 % of the time." in text
    assert re.search(r"reading +6\.66 ms +67 %", text) and re.search(r"Python +1.00 ms +10 %", text)


def test_an_unusually_long_step_says_so():
    stage = ready()
    stage.session.obey("alone")
    stage.finish()
    stage.session.obey("/cost")
    begin = stage.engine.runner.begin

    def slow(order):
        flight = begin(order)
        flight.cost += 0.05
        return flight

    stage.engine.runner.begin = slow
    stage.session.obey("/set max=2")
    stage.session.obey("once more")
    stage.finish()
    while stage.state.step.prefill or stage.state.step.seconds < 0.02:
        stage.state.move(-1)
    assert "Other steps with as many rows took 10.0 ms." in page(stage)


def test_sequences_that_do_not_fit_are_counted():
    parts = [Member(id, 1, 500 - id) for id in range(1, 31)]
    for width in range(30, 120):
        words = step_cost.named(parts, width)
        shown = re.findall(r"r\d+", words)
        left = int(re.search(r"(\d+) more$", words)[1])
        assert len(shown) + left == 30 and shown[0] == "r1"
        assert len(words) <= width or len(shown) == 1
    assert step_cost.named(parts[:1], 10) == "499 rows of r1"


def test_the_arrows_lead_to_other_steps_and_s_takes_one():
    async def scenario(it):
        it.stage.session.obey("/burst 4")
        await it.turns(30)
        await it.press("space", "B")
        newest = it.stage.state.history[-1].step
        assert f"The cost of step {newest:,}" in it.text()
        await it.press("left", "left")
        assert f"The cost of step {newest - 2:,}" in it.text()
        await it.press("s", turns=2)
        assert f"The cost of step {newest + 1:,}" in it.text() and "behind" not in it.text()
        await it.press("B")
        assert "Slots" in it.text()

    show(scenario, ready(), load=False)


def test_the_roofline_is_measured_once_off_the_clock():
    """It takes as long as a hundred steps, and a request that waits is not said to have waited so
    long. What was in flight has been read before, so its time is its own."""
    stage = ready()
    measured = []

    def measure(others: float) -> None:
        assert not stage.engine._in_flight
        stage.time.now += 5.0
        measured.append(stage.time.now)
        stage.engine.registry.roof = ROOF

    stage.client._measure_roofline = measure
    stage.session.obey("/burst 9")
    stage.turns(5)
    assert stage.engine._in_flight, "the engine runs ahead"
    stage.session.obey("/cost")
    stage.turns(1)
    stage.session.obey("/cost")
    stage.finish()
    assert len(measured) == 1
    assert max(column.view.seconds for column in stage.state.history) < 0.1
    assert max(r.metrics.ttft_s for r in stage.state.ended) < 3
    stage.session.obey("/cost again")
    stage.finish()
    assert len(measured) == 2
    with pytest.raises(ValueError, match="only again may follow"):
        stage.session.obey("/cost twice")


def test_a_roofline_measured_next_to_other_programs():
    stage = ready()
    stage.client.others.look = lambda: 1.4
    stage.client._measure_roofline = lambda others: setattr(
        stage.engine.registry, "roof", ROOF._replace(reading=5e9, others=others)
    )
    stage.session.obey("alone")
    stage.session.obey("/cost")
    stage.finish()
    stage.state.move(-3)
    text = page(stage)
    roof = "arithmetic 100 GFLOP/s; the weights once more 10.0 GB/s; other programs took 1.4 cores"
    assert f"{roof} then: /cost again" in " ".join(text.split())
    assert "cache" not in text and "Reading bounds it" in text
    stage.client.others.look = lambda: 0.0
    stage.session.obey("/cost again")
    stage.turns()
    text = page(stage)
    assert "; the model fits a cache, which yields 10.0 GB/s" in text
    assert "more than memory yields: the weights are in a cache" in " ".join(text.split())


def test_shards_and_windows_are_named():
    """With a window of 30 rows, a sequence of 40 reads all of its own, and hides ten."""
    stage = ready()
    stage.engine.registry.model = VIEW._replace(window=30, windowed=3)
    stage.engine.ranks = SimpleNamespace(view=RanksView("ring", (3, 4)), size=1, leave=lambda: None)
    stage.session.obey("a" * 20)
    stage.turns(5)
    text = page(stage)
    assert "read once (the share of rank 0, of 2)" in text and "window" not in text
    stage.turns(20)
    assert "3 of 4 layers see 30 rows; older ones are read, and hidden" in page(stage)


def test_missed_steps_have_no_cost():
    stage = ready()
    stage.session.obey("/burst 4")
    stage.turns(20)
    here = stage.state.history[-1]
    stage.state.history[-1] = gap(UNSEEN, here.view, stage.state.history[-2], 9, 9)
    text = page(stage)
    assert "9 steps up to this one went by before the screen looked" in text and "roof" in text
    assert "in products" not in text and "measured  " not in text.replace("measured │", "")
    assert step_cost.cost_line(stage.state).startswith(
        "9 steps up to this one went by before the screen looked, and 9 tokens came. The roofline"
    )


def test_before_anything_has_run_the_table_is_there():
    stage = ready()
    text = page(stage, 80, 24)
    assert "Nothing has run yet" in text and len(re.findall(r"^ +\d+ +[\d.]+ MB", text, re.M)) == 5


# --- experts


def expert_stage() -> Stage:
    """An engine of words whose tokens take experts 0 and 1, or 1 and 2, in turn."""
    stage = ready()
    model = VIEW._replace(experts=8, taken=2, expert_nbytes=500_000, expert_products=125_000)
    stage.engine.registry.model = model
    stage.asked = []

    def chosen() -> ExpertsView:
        step = stage.engine.sched.steps
        stage.asked.append(step)
        decode = sum(slot.request is not None for slot in stage.engine.snapshot().slots)
        layer = ((1, decode), (0, decode - decode // 2), (2, decode // 2))
        return ExpertsView(step, (layer,) * model.layers)

    stage.client._chosen_experts = chosen
    return stage


async def looks(it) -> None:
    """The screen asks when it looks, the loop answers in its next turn, and the look after shows
    it."""
    for _ in range(3):
        await it.turns()


def test_experts_are_asked_only_while_the_page_is_open():
    async def scenario(it):
        stage = it.stage
        stage.session.obey("/burst 3")
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

    show(scenario, expert_stage(), (120, 40), load=False)


def test_failed_questions_are_not_repeated():
    """Ten times a second it would fill the page of errors."""

    async def scenario(it):
        stage = it.stage
        stage.client._chosen_experts = lambda: stage.asked.append(stage.engine.sched.steps) or 1 / 0
        stage.session.obey("/burst 3")
        await it.turns(20)
        await it.press("space", "B", turns=3)
        for _ in range(3):
            await looks(it)
        assert len(stage.asked) == 1
        await it.press("s")
        await looks(it)
        assert len(stage.asked) == 2 and "expected: " in it.text()

    show(scenario, expert_stage(), (120, 40), load=False)


def test_experts_of_one_of_two_passes_are_not_used():
    stage = expert_stage()
    stage.session.obey("/burst 3")
    stage.turns(20)
    stage.session.obey("/pause")
    stage.turns(3)
    stage.client.ask_experts()
    stage.turns()
    step = stage.state.step.step
    assert step_cost.seen_experts(stage.state, stage.state.here)
    layers = step_cost.experts_in(stage.state)[step].layers
    step_cost.experts_in(stage.state)[step] = ExpertsView(step, (layers[0][:1], *layers[1:]))
    assert not step_cost.seen_experts(stage.state, stage.state.here)
    assert "expected: " in page(stage)


def test_only_the_newest_hundred_answers_are_kept():
    stage = expert_stage()
    stage.session.obey("/burst 9")
    for _ in range(130):
        stage.turns()
        stage.client.ask_experts()
    stage.turns()
    assert len({*stage.asked}) > 105 and len(step_cost.experts_in(stage.state)) == 100
    assert max(step_cost.experts_in(stage.state)) == max(stage.asked)


# --- elsewhere


def test_a_watched_roofline_is_not_measured():
    stage = expert_stage()
    stage.session.obey("/burst 3")
    stage.turns(20)
    stage.session.client = RemoteEngineClient("127.0.0.1:1")
    stage.session.obey("/cost")
    stage.state.view = stage.state.view._replace(watches=True)
    text = page(stage)
    assert "not measured there" in text and "bounds" not in text
    assert "expected: 3.50 a layer (only its own screen knows which)" in text
    assert re.search(r"Python +1.00 ms", text) and "reading  " not in text


def test_the_log_has_the_cost_once_the_roofline_is_known():
    lines = []
    stage = ready()
    log = PlainLog(stage.session, lines.append)
    log.obey("/cost")
    assert not any("roof" in line for line in lines), "it waits for the measurement"
    stage.client.loop.turn()
    log.look()
    assert lines[-1:] == [
        "no step has run yet; the roofline: memory 10.0 GB/s, arithmetic 100 GFLOP/s"
    ]
    stage.session.obey("alone")
    stage.finish()
    stage.state.move(-3)
    log.obey("/cost")
    line = lines[-1]
    assert line.startswith("step ") and "1 token; weights 64.0 MB, read once; keys" in line
    assert "took 10.0 ms, of it Python 1.00 ms" in line and line.endswith("67 % of the time.")
    assert orders_of("burst3 cost", logged=True) == [("burst", "3"), ("cost", "")]
