"""However a request ends, its owner is told once, after the fact, and with nothing locked. And what an owner's function
may not do: step the engine, or wait for it."""

import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from harness import interrupt
from plants import poisoned

import nanobatch
from nanobatch import Engine, Sampling
from parts.device.mlx import device_lock

ROOT = Path(__file__).parents[2]
LONG = Sampling(max_tokens=30, ignore_eos=True)
FEW = Sampling(max_tokens=6, ignore_eos=True)
SHORT = Sampling(max_tokens=3, ignore_eos=True)


class Told:
    """An `ended` that writes down what it is told, and looks around while it is called."""

    def __init__(self, engine: Engine):
        self.engine, self.calls = engine, []

    def __call__(self, handle) -> None:
        result = handle.result(timeout=0)  # it has ended: nothing to wait for
        assert handle.finish_reason is not None and result.finish_reason == handle.finish_reason
        assert handle.request.ended is not None and handle.id not in self.engine.sched.running
        taken = []
        other = threading.Thread(target=lambda: taken.append(self.engine.snapshot()))  # takes the engine's lock
        other.start()
        other.join(30)
        assert taken, "the engine is locked while an owner is told"
        assert handle.id in [view.id for view in taken[0].ended]
        self.calls.append((handle.id, result))

    def once(self, *handles) -> bool:
        return sorted(id for id, _ in self.calls) == sorted(handle.id for handle in handles)


@pytest.fixture(scope="module")
def parts_folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def alone(parts):
    """The answer to a prompt that has an engine for itself: it is asked for once, and serves many tests."""
    with Engine(*parts, slots=1, max_len=128, chunk=32) as engine:
        yield cache(lambda *prompt: engine.submit(list(prompt), LONG).result().tokens)


@pytest.fixture(params=[True, False], ids=["run-ahead", "plain"])
def engine(parts, request):
    with Engine(*parts, slots=2, max_len=128, chunk=32, run_ahead=request.param) as engine:
        yield engine


# --- every way to end --------------------------------------------------------------------------------------------


def test_an_owner_is_told_of_an_answer_that_reached_its_length(engine):
    told = Told(engine)
    handle = engine.submit([1, 2], LONG, ended=told)
    result = handle.result()
    assert told.calls == [(handle.id, result)] and result.finish_reason == "length" and len(result.tokens) == 30


def test_an_owner_is_told_of_an_answer_that_stopped(engine):
    tokens, told = engine.submit([1, 2], LONG).result().tokens, Told(engine)
    handle = engine.submit([1, 2], Sampling(max_tokens=30, ignore_eos=True, stop=[tokens[4]]), ended=told)
    result = handle.result()
    while engine.step():  # its ghost
        pass
    assert told.calls == [(handle.id, result)] and result.finish_reason == "stop"


def test_an_owner_is_told_of_a_cancel_in_every_phase(parts):
    """Queued behind another one, in prefill, in decode. A second cancel, and the end of its ghost, tell nothing new."""
    phases = set()
    for steps in range(16):
        with Engine(*parts, slots=1, max_len=128, chunk=32, budget=1) as engine:
            told = Told(engine)
            first = engine.submit([3], Sampling(max_tokens=2, ignore_eos=True), ended=told)
            handle = engine.submit([1] * 90, LONG, ended=told)
            for _ in range(steps):
                engine.step()
            phases.add(handle.request.phase)
            handle.cancel()
            assert handle.id in [id for id, _ in told.calls], "not at once"
            handle.cancel()
            while engine.step():
                pass
            assert told.once(first, handle) and handle.result().finish_reason == "cancelled"
    assert phases == {"queued", "prefill", "decode"}


def test_an_owner_is_told_of_a_failed_step(engine, monkeypatch):
    told = Told(engine)
    handles = [engine.submit([n], LONG, ended=told) for n in range(3)]
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(nanobatch, "forward", lambda *args: 1 / 0)
        engine.step()
    assert told.once(*handles[:2]), "those in the step, and not the one in line"
    assert [result.finish_reason for _, result in told.calls] == ["error", "error"]
    handles[2].result()
    assert told.once(*handles) and told.calls[-1][1].finish_reason == "length"


def test_an_owner_is_told_of_a_number_that_is_not_finite(parts):
    with Engine(poisoned(parts[0], 99), parts[1], slots=1, max_len=128, chunk=32) as engine:
        told = Told(engine)
        handle = engine.submit([99, 1], LONG, ended=told)
        assert handle.result().finish_reason == "error" and told.once(handle)


def test_an_owner_is_told_that_his_own_listener_raised(engine):
    told = Told(engine)
    handle = engine.submit([1, 2], LONG, lambda handle, piece: 1 / 0, ended=told)
    assert handle.result().finish_reason == "error" and told.once(handle)
    assert "ZeroDivisionError" in told.calls[0][1].error


def test_owners_are_told_of_a_close(parts):
    engine = Engine(*parts, slots=1, max_len=128, chunk=32)
    told = Told(engine)
    handles = [engine.submit([n], LONG, ended=told) for n in range(3)]
    engine.step(), engine.step()
    engine.close()
    assert told.once(*handles)
    engine.close()
    assert told.once(*handles) and {result.finish_reason for _, result in told.calls} == {"cancelled"}


def test_owners_are_told_by_a_thread_that_serves(engine):
    told, where = Told(engine), []
    with engine.serving():
        handles = []
        for n in range(6):
            handles.append(engine.submit([n], SHORT, ended=told))
            handles.append(
                engine.submit([n], SHORT, ended=lambda handle: where.append(threading.current_thread().name))
            )
        for handle in handles:
            handle.result(timeout=30)
    assert told.once(*handles[::2]) and where == ["nanobatch"] * 6


def test_ctrl_c_at_any_line_of_a_wait_is_ctrl_c(engine):
    """Python's condition has let go of its lock at some of them, and a RuntimeError came out instead: exit code 1."""
    seen = set()

    def trace(frame, event, argument):
        if frame.f_code is not threading.Condition.wait.__code__:
            return None
        if event == "line" and frame.f_lineno not in seen:
            sys.settrace(None)
            seen.add(frame.f_lineno)
            raise KeyboardInterrupt
        return trace

    with engine.serving():
        handle = engine.submit([1], LONG)
        for _ in range(8):
            sys.settrace(trace)
            with pytest.raises(KeyboardInterrupt):
                handle.result()
        assert len(seen) == 8
        assert handle.result(timeout=30).finish_reason == "length"


def test_a_refused_prompt_has_no_end_to_tell_of(engine):
    told = Told(engine)
    with pytest.raises(ValueError, match="slot holds"):
        engine.submit([1] * 120, LONG, ended=told)
    engine.submit([1], SHORT).result()
    assert told.calls == []


def test_ctrl_c_at_any_line_of_a_step_lets_every_owner_be_told_once_and_the_engine_be_used(engine, alone):
    """Three requests on two slots: admissions, prefill, decode and ends, broken off at one line after another."""
    interrupted = 0
    for at in range(0, 2_600, 13):
        told = []
        handles = [
            engine.submit([n] * 30 * n, SHORT, ended=lambda handle, told=told: told.append(handle.id))
            for n in (1, 2, 3)
        ]
        interrupted += interrupt(lambda: [engine.step() for _ in range(9)], at)
        while engine.step():
            pass
        assert sorted(told) == [handle.id for handle in handles], f"line {at}"
        assert all(handle.result(timeout=30).finish_reason in ("length", "error") for handle in handles)
        engine.check()
    assert interrupted > 150
    assert engine.submit([4, 5], LONG).result().tokens == alone(4, 5)


@pytest.mark.parametrize("what", ["cancel", "close"])
def test_ctrl_c_at_any_line_of_cancel_and_close_lets_every_owner_be_told_once(parts, what):
    interrupted, within = 0, True
    while within:  # up to the last line
        at = interrupted * (1 if what == "cancel" else 3)
        with Engine(*parts, slots=2, max_len=128, chunk=32) as engine:
            told = []
            handles = [engine.submit([n], FEW, ended=lambda handle, told=told: told.append(handle.id)) for n in (1, 2)]
            for _ in range(3):
                engine.step()
            within = interrupt(handles[0].cancel if what == "cancel" else engine.close, at)
            interrupted += within
            while engine.step():
                pass
            engine.close()
            assert sorted(told) == [handle.id for handle in handles], f"line {at}"
    assert interrupted > 15


# --- what `ended` itself does ------------------------------------------------------------------------------------


def test_what_ended_raises_changes_no_request_and_those_who_watch_see_it(engine):
    expected = engine.submit([1, 2], LONG).result().tokens
    before = engine.snapshot()
    assert before.faults == ()
    bad = engine.submit([1, 2], LONG, ended=lambda handle: {}["no such thing"])
    good = engine.submit([1, 2], LONG)
    panics = engine.submit([1, 2], LONG, ended=lambda handle: exit(3))
    assert [handle.result().tokens for handle in (bad, good, panics)] == [expected] * 3
    assert {handle.finish_reason for handle in (bad, good, panics)} == {"length"} and bad.error is None
    after = engine.snapshot(before)
    assert len(after.faults) == 2 and "KeyError" in after.faults[0] and f"request {bad.id} " in after.faults[0]
    assert "SystemExit" in after.faults[1] and engine.snapshot(after).faults == ()


def test_ended_may_submit_cancel_and_look_and_its_own_requests_ends_are_told_too(engine):
    told, more = [], []

    def ended(handle):
        told.append(handle.id)
        if len(told) < 4:
            more.append(engine.submit([5], LONG, ended=ended))
            more[-1].cancel()
            engine.snapshot()

    engine.submit([1], SHORT, ended=ended).result()
    assert [handle.finish_reason for handle in more] == ["cancelled"] * 3
    assert told == [1, 2, 3, 4]


def test_a_listener_that_cancels_itself_and_its_neighbour_lets_both_be_told_when_the_lock_is_free(engine):
    told = Told(engine)
    neighbour = engine.submit([1], LONG, ended=told)

    def listener(handle, piece):
        handle.cancel(), neighbour.cancel()
        assert told.calls == [], "inside a commit, the engine is locked"

    handle = engine.submit([2], LONG, listener, ended=told)
    assert handle.result().finish_reason == "cancelled" and handle.error is None
    assert told.once(neighbour, handle)


# --- neither step nor wait ---------------------------------------------------------------------------------------


def steps_or_waits(engine: Engine, other) -> dict:
    return {
        "step": lambda: engine.step(),
        "result": lambda: other.result(),
        "result, at most so long": lambda: other.result(timeout=0.1),
        "iterate": lambda: list(other),
        "generate": lambda: engine.generate([[1]], SHORT),
        "serve": lambda: engine.serving().__enter__(),
        "submit and wait": lambda: engine.submit([7], SHORT).result(),
    }


WAYS = list(steps_or_waits(None, None))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("serving", [False, True])
def test_a_listener_that_steps_or_waits_ends_alone_and_no_neighbours_token_changes(engine, alone, way, serving):
    """It committed the next step half-way through this one, and its neighbours got each other's tokens."""
    prompts = [[1, 2], [3], [4] * 40]
    expected, own = [alone(*prompt) for prompt in prompts], alone(9, 9)
    heard = []

    def listener(handle, piece):
        heard.append(piece)
        if len(heard) == 3:
            steps_or_waits(engine, neighbours[2])[way]()

    def run():
        neighbours[:] = [engine.submit(prompt, LONG) for prompt in prompts[:1]]
        bad = engine.submit([9, 9], LONG, listener)
        neighbours.extend(engine.submit(prompt, LONG) for prompt in prompts[1:])
        return bad.result(timeout=20), [handle.result(timeout=20) for handle in neighbours]

    neighbours = []
    if serving:
        with engine.serving():
            result, results = run()
    else:
        result, results = run()
    assert result.finish_reason == "error" and "inside a listener" in result.error
    assert 0 < len(result.tokens) < 30 and result.tokens == own[: len(result.tokens)]
    assert [each.tokens for each in results] == expected and len(heard) == 3
    engine.check()
    assert engine.submit([9, 9], LONG).result().tokens == own
    assert not any(thread.name == "nanobatch" for thread in threading.enumerate())


@pytest.mark.parametrize("way", WAYS)
def test_an_ended_that_steps_or_waits_is_refused_and_nothing_else_changes(engine, alone, way):
    expected = [alone(n) for n in (1, 2)]
    before = engine.snapshot()
    other = engine.submit([2], LONG)
    first = engine.submit([1], SHORT, ended=lambda handle: steps_or_waits(engine, other)[way]())
    assert first.result().tokens == expected[0][:3] and other.result().tokens == expected[1]
    faults = engine.snapshot(before).faults
    assert len(faults) == 1 and "ListenerError" in faults[0] and "inside a listener" in faults[0]


def test_a_listener_that_presses_ctrl_c_in_a_serving_thread_ends_alone(engine):
    """Python raises a real one in the main thread only. This one took everybody in the same step with it."""
    expected = engine.submit([1, 2], LONG).result().tokens
    with engine.serving():
        good = engine.submit([1, 2], LONG)
        bad = engine.submit([1, 2], LONG, lambda handle, piece: (_ for _ in ()).throw(KeyboardInterrupt))
        told = engine.submit([1, 2], LONG, ended=lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
        assert bad.result(timeout=30).error == "KeyboardInterrupt"
        assert good.result(timeout=30).tokens == told.result(timeout=30).tokens == expected


def test_what_a_listener_raises_after_it_has_cancelled_itself_changes_nothing_that_is_final(engine):
    """The handle got an error after its owner had been told that there was none."""
    told, before = Told(engine), engine.snapshot()
    handle = engine.submit([1, 2], LONG, lambda handle, piece: (handle.cancel(), 1 / 0), ended=told)
    assert handle.result().finish_reason == "cancelled" and handle.error is None
    assert told.calls == [(handle.id, handle.result())]
    assert [view.error for view in engine.snapshot(before).ended] == [None]
    (fault,) = engine.snapshot(before).faults
    assert f"request {handle.id} " in fault and "ZeroDivisionError" in fault


def test_an_owner_is_told_of_a_cancel_by_a_listener_of_another_engine(engine, parts):
    """He was told when his own engine stepped next: if nothing else came, never."""
    with Engine(*parts, slots=2, max_len=128, chunk=32) as other:
        told = Told(other)
        handles = [other.submit([n], LONG, ended=told) for n in range(3)]

        def listener(handle, piece):
            if len(handle.tokens) == 3:
                handles[0].cancel(), other.close()
                assert told.calls == [], "the engine of this listener is locked"

        assert engine.submit([1], LONG, listener).result().finish_reason == "length"
        assert told.once(*handles)


@pytest.mark.parametrize("act", ["other.close()", "loop.stop()"])
def test_a_listener_that_closes_another_engine_does_not_wait_for_its_thread(parts_folder, act):
    """That thread wanted the device, which the listener's own step held: both hung, and so did the program's end."""
    code = f"""
import sys, threading, time; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from nanobatch import Engine, Sampling, Text
from parts.model.load import read_model
from parts.api.loop import Loop
folder = Path({str(parts_folder)!r})
one, other = (Engine(read_model(folder), Text(folder, 272), slots=2, max_len=128, chunk=32) for _ in range(2))
loop = Loop(other).start()
def listener(handle, piece):
    global waiting
    waiting = other.submit([1], Sampling(max_tokens=100, ignore_eos=True))
    time.sleep(0.1)  # by now its thread wants to step
    {act}
result = one.submit([1], Sampling(max_tokens=1, ignore_eos=True), listener).result()
assert result.finish_reason == "length", result
assert loop.stop(patience=5)
other.close()
assert waiting.result().finish_reason == "cancelled"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, text=True)
    assert done.returncode == 0, done.stderr


def test_a_listener_may_ask_for_what_is_there_already(engine):
    ready = engine.submit([3], SHORT)
    expected = ready.result()
    found = []

    def listener(handle, piece):
        found.append((ready.result(), "".join(ready)))

    assert engine.submit([1], LONG, listener).result().finish_reason == "length"
    assert len(found) > 5 and all(each == (expected, expected.text) for each in found)


def test_a_refusal_ends_with_the_listener(engine):
    """The thread may step again as soon as the listener has returned, also where it raised."""
    engine.submit([1], LONG, lambda handle, piece: 1 / 0).result()
    assert engine.submit([1], LONG).result().finish_reason == "length"
    assert not device_lock._is_owned()
