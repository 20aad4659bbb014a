"""The thread that steps an engine: it sleeps, wakes, pauses, runs single steps, and survives failing
callbacks."""

import sys
import threading
import time

import pytest
from harness import exactly
from waiting import wait_for

from engine.loop import Loop, Stopwatch

LONG = exactly(60)
SHORT = exactly(3)


@pytest.fixture
def loop(engine):
    loop = Loop(engine).start()
    yield loop
    assert loop.stop(patience=60)


def test_paused_loop_takes_no_step(engine, loop):
    loop.pause()
    wait_for(lambda: loop.paused)
    handle = engine.submit([1], LONG)
    time.sleep(0.1)
    assert engine.registry.steps.count == 0 and handle.tokens == []
    loop.resume()
    assert handle.result(timeout=60).finish_reason == "length"


@pytest.mark.parametrize("run_ahead", [True, False])
def test_single_steps_are_counted(make_engine, run_ahead):
    """A single step commits one step, although with run-ahead the first call of `engine.step` only starts
    one."""
    engine = make_engine(run_ahead=run_ahead)
    loop = Loop(engine).start()
    loop.pause()
    handle = engine.submit([1], LONG)
    for count, expected in ((1, 1), (1, 2), (3, 5)):
        loop.step(count)
        wait_for(
            lambda expected=expected: engine.registry.steps.count == expected and loop.stepping == 0
        )
        time.sleep(0.05)
        assert engine.registry.steps.count == len(handle.tokens) == expected and loop.paused
    loop.resume()
    assert handle.result(timeout=60).finish_reason == "length"
    assert loop.stop(patience=60)


def test_surplus_single_steps_are_dropped(engine, loop):
    """Single steps that find no work are dropped instead of running when work arrives later."""
    loop.pause()
    handle = engine.submit([1], SHORT)
    loop.step(100)
    assert handle.result(timeout=60).finish_reason == "length"
    wait_for(lambda: loop.stepping == 0)
    assert loop.paused
    later = engine.submit([1], SHORT)
    time.sleep(0.1)
    assert later.tokens == []


def test_command_runs_between_steps(engine, loop):
    """A command may arrive at any moment, but never runs during a step."""
    inside, seen = [], []
    begin = engine.runner.start_forward

    def watched(order):
        inside.append(1)
        try:
            return begin(order)
        finally:
            inside.pop()

    engine.runner.start_forward = watched
    handle = engine.submit([1], exactly(100))
    for _ in range(50):
        loop.call(lambda: seen.append((len(inside), threading.current_thread().name)))
        time.sleep(0.001)
    handle.result(timeout=60)
    wait_for(lambda: len(seen) == 50)
    assert set(seen) == {(0, "nanobatch")}


def test_failing_command_is_logged(engine, loop):
    """The command after a failing one still runs."""
    done = threading.Event()
    loop.call(lambda: 1 / 0)
    loop.call(lambda: exit(3))
    loop.call(done.set)
    assert done.wait(60)
    faults = engine.snapshot().faults
    assert len(faults) == 2 and "ZeroDivisionError" in faults[0] and "SystemExit" in faults[1]
    assert engine.submit([1], SHORT).result(timeout=60).finish_reason == "length"


@pytest.mark.parametrize("how", ["result", "serve"])
def test_waiting_command_is_refused(engine, loop, how):
    """Regression: a command in the loop's thread waited for a step that only this thread could run, and every
    later caller hung."""
    acts = {
        "result": lambda: engine.submit([7], SHORT).result(),
        "serve": lambda: engine.serving().start(),
    }
    loop.call(acts[how])
    wait_for(lambda: engine.snapshot().faults)
    assert ("already" if how == "serve" else "cannot wait for it") in engine.snapshot().faults[0]
    assert engine.submit([1], SHORT).result(timeout=60).finish_reason == "length"


def test_between_is_called_as_often_as_it_asks(make_engine):
    """`between` is called after each step, and again after the number of seconds that it returns."""
    engine = make_engine(speculate=0)
    steps = []
    loop = Loop(engine, between=lambda: steps.append(engine.registry.steps.count)).start()
    engine.submit([1], LONG).result(timeout=60)
    wait_for(lambda: steps[-1] == 60)
    assert set(range(1, 61)) <= set(steps)
    count = len(steps)
    time.sleep(0.2)
    assert len(steps) == count, "it is called although nothing happens"
    assert loop.stop(patience=60)
    calls = []
    loop = Loop(engine, between=lambda: calls.append(1) or 0.02).start()
    wait_for(lambda: len(calls) > 5)
    assert engine.registry.steps.count == 60
    assert loop.stop(patience=60)


@pytest.mark.parametrize("paused", [True, False])
def test_stopped_loop_returns_the_engine(engine, paused):
    loop = Loop(engine).start()
    if paused:
        loop.pause()
        wait_for(lambda: loop.paused)
    handle = engine.submit([1], LONG)
    assert loop.stop(patience=60) and loop.stop()
    assert handle.result(timeout=60).finish_reason == "length"  # stepped by this thread


def test_waiter_steps_after_the_loop_stops(engine):
    """Regression: `result()` waited for a loop that had stopped."""
    loop, reasons = Loop(engine).start(), []
    loop.pause()
    handle = engine.submit([1], LONG)
    waiter = threading.Thread(
        target=lambda: reasons.append(handle.result(timeout=60).finish_reason)
    )
    waiter.start()
    time.sleep(0.1)
    assert reasons == [] and loop.stop(patience=60)
    waiter.join(60)
    assert reasons == ["length"]


def test_command_can_stop_the_loop(engine):
    """A loop that is stopped by its own thread does not wait for that thread."""
    loop = Loop(engine).start()
    stopped = []
    loop.call(lambda: stopped.append(loop.stop()))
    wait_for(lambda: stopped == [True])
    assert loop.stop(patience=60)


def test_an_engine_has_one_loop_at_a_time(engine, loop):
    with pytest.raises(RuntimeError, match="already"):
        Loop(engine).start()
    assert engine.submit([1], SHORT).result(timeout=60).finish_reason == "length"


def test_stopped_stopwatch_stands_still():
    now = [10.0]
    watch = Stopwatch(lambda: now[0])
    readings = []
    for act, seconds in (
        ("resume", 3.0),
        ("stop", 5.0),
        ("stop", 7.0),
        ("resume", 2.0),
        ("resume", 1.0),
    ):
        getattr(watch, act)()
        now[0] += seconds
        readings.append(watch())
    assert readings == [3.0, 3.0, 3.0, 5.0, 6.0]


def test_stopwatch_without_a_stop_is_exact():
    """Regression: the stopwatch read its clock twice, and /metrics reported a negative pause."""
    watch = Stopwatch(iter(range(100)).__next__)
    assert watch.stopped_s == 0
    watch.stop()
    assert watch.stopped_s > 0


def test_stopwatch_is_monotonic():
    """Regression: when a pause ended between two reads of a field, a client's submit raised a TypeError or
    got a time in the past."""
    watch, wrong, readings = Stopwatch(), [], []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                readings.append(watch())
        except TypeError as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        until = time.monotonic() + 0.3
        while (time.monotonic() < until or len(readings) <= 1000) and not wrong:
            watch.stop()
            watch.resume()
        done.set()
        reader.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not wrong and readings == sorted(readings)


def test_slow_motion_rate(make_engine):
    """The loop runs `slow` steps a second, and the engine's clock stops between them."""
    watch = Stopwatch()
    engine = make_engine(clock=watch)
    engine.submit([1], SHORT).result()  # warm up
    loop = Loop(engine, clock=watch).start()
    loop.slow = 10.0
    loop.call(lambda: None)
    began, told, before = time.monotonic(), watch(), engine.registry.steps.count
    handle = engine.submit([1], exactly(4))
    assert (
        handle.result(timeout=60).finish_reason == "length"
        and engine.registry.steps.count - before == 4
    )
    took = time.monotonic() - began
    counted = engine.snapshot().steps[-1].ended - told
    assert took > 0.28, "four steps begin a tenth of a second apart"
    assert took - counted > 0.02, "the clock went on while nothing ran"
    assert loop.stop(patience=60)


def test_slow_motion_can_be_left_at_once(make_engine):
    """In slow motion, calls run at once, and the next step runs when slow motion ends. It used to wait forever."""
    watch = Stopwatch()
    engine = make_engine(clock=watch)
    loop = Loop(engine, clock=watch).start()
    loop.slow = 0.01
    handle, heard = engine.submit([1], LONG), threading.Event()
    wait_for(lambda: engine.registry.steps.count == 1)
    loop.call(heard.set)
    assert heard.wait(60) and engine.registry.steps.count == 1
    loop.step(1)  # a single step is delayed, too
    loop.call(lambda: setattr(loop, "slow", 0.0))
    wait_for(lambda: engine.registry.steps.count == 2)
    assert loop.paused
    loop.resume()
    assert handle.result(timeout=60).finish_reason == "length"
    assert loop.stop(patience=60)


def test_slow_motion_wakes_for_a_request(make_engine):
    """A request wakes the loop even when the next step is not due yet."""
    watch, turns = Stopwatch(), []
    engine = make_engine(clock=watch)
    loop = Loop(engine, between=lambda: turns.append(1), clock=watch)
    loop.slow = 10.0
    loop.start()
    wait_for(lambda: turns)  # an idle turn; the next step is due a tenth of a second later
    handle = engine.submit([1], SHORT)
    wait_for(lambda: handle.finish_reason == "length")
    assert loop.stop(patience=60)


def test_step_without_a_plan(engine):
    """`step(plan=False)` only commits the step in flight, and no token is lost."""
    handle = engine.submit([1], LONG)
    for i in range(1, 9):
        engine.step()
        engine.step(plan=False)
        look = engine.snapshot()
        assert look.planned == engine.registry.steps.count == len(handle.tokens) == i
        assert not engine.step(plan=False)
    alone = handle.result().tokens
    assert engine.submit([1], LONG).result().tokens == alone


def test_a_pause_stops_the_engines_clock(make_engine):
    watch = Stopwatch()
    engine = make_engine(clock=watch)
    loop = Loop(engine, clock=watch).start()
    loop.pause()
    wait_for(lambda: loop.paused and watch() == watch())
    began = time.monotonic()
    handle = engine.submit([1], SHORT)
    before = watch()
    time.sleep(0.3)
    assert watch() == before
    loop.resume()
    metrics = handle.result(timeout=60).metrics
    assert metrics.queued_s <= metrics.ttft_s < time.monotonic() - began - 0.3
    assert loop.stop(patience=60)
