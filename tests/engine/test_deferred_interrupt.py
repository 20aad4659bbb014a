"""Ctrl-C takes effect between two steps and leaves the engine usable."""

import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
from harness import check, exactly, interrupt
from processes import python

import runner
from engine.deferred_interrupt import defer_interrupt
from nanobatch import Engine

LONG = exactly(30)
FEW = exactly(6)
PROMPTS = ([1], [2] * 30, [3] * 60)


@pytest.fixture(scope="module")
def expected(parts):
    with Engine(*parts, slots=2, max_len=128, chunk=32) as engine:
        yield [result.tokens for result in engine.generate(PROMPTS, FEW)]


@pytest.fixture(params=[True, False], ids=["run-ahead", "plain"])
def engine(parts, request):
    with Engine(*parts, slots=2, max_len=128, chunk=32, run_ahead=request.param) as engine:
        yield engine


def is_whole(engine: Engine, expected: list[list[int]]) -> bool:
    """Step until idle. Return True if no request is left, and the next ones are answered correctly."""
    while engine.step():
        pass
    check(engine)
    look = engine.snapshot()
    at_rest = look.submitted == look.finished and all(slot.request is None for slot in look.slots)
    return at_rest and [result.tokens for result in engine.generate(PROMPTS, FEW)] == expected


# --- the block ----------------------------------------------------------------------------------


def test_ctrl_c_is_deferred_to_the_end_of_a_block():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_interrupt() as held:
        signal.raise_signal(signal.SIGINT)
        done.append(held.is_pending)
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_call_a_handler_once():
    """The program's own handler is called once, at the end of the outer block."""
    calls, order = [], []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(list(order)))
    try:
        with defer_interrupt():
            with defer_interrupt():
                signal.raise_signal(signal.SIGINT)
                order.append("inner")
            order.append("outer")
        assert calls == [["inner", "outer"]]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_interrupt() as held:
            signal.raise_signal(signal.SIGINT)
        assert not held.is_pending and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_signal_alone():
    found = []

    def look() -> None:
        with defer_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


def test_second_ctrl_c_ends_the_process():
    code = """
import signal
from engine.deferred_interrupt import defer_interrupt
with defer_interrupt():
    signal.raise_signal(signal.SIGINT)
    print("goes on", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("goes on after the second", flush=True)
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "goes on\n", "")


def test_second_ctrl_c_is_immediate():
    """Regression: a server that received a second Ctrl-C while it disconnected its other ranks exited with
    130, although its own handler would have shut it down in order."""
    calls, order = [], []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(list(order)))
    try:
        with defer_interrupt():
            for word in ("first", "second", "third"):
                signal.raise_signal(signal.SIGINT)
                order.append(word)
        assert calls == [["first"], ["first", "second"], ["first", "second", "third"]]
    finally:
        signal.signal(signal.SIGINT, before)


# --- a step -------------------------------------------------------------------------------------


def test_ctrl_c_finishes_the_step(engine, monkeypatch):
    """The step that Ctrl-C interrupts is completed, and no request ends."""
    alone = engine.submit([4, 5], LONG).result().tokens
    forward, steps = runner.forward, []

    def pressed(*args):
        signal.raise_signal(signal.SIGINT)
        steps.append(engine.registry.steps.count)
        return forward(*args)

    handle = engine.submit([4, 5], LONG)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "forward", pressed)
        with pytest.raises(KeyboardInterrupt):
            handle.result()
    assert len(steps) == 1 and engine.registry.steps.count == steps[0] + 1, (
        "the step has been committed"
    )
    assert handle.result(timeout=60).tokens == alone and handle.error is None


def test_ctrl_c_at_any_line_of_a_step(engine, expected):
    """With three requests on two slots, interrupt every 65th line of admission, prefill, decode and finishing."""
    interrupted = 0
    for at in range(0, 2_600, 65):
        handles = [engine.submit(prompt, FEW) for prompt in PROMPTS]
        interrupted += interrupt(lambda: [engine.step() for _ in range(9)], at)
        assert [handle.result(timeout=60).tokens for handle in handles] == expected, f"line {at}"
        check(engine)
    assert interrupted > 24 and is_whole(engine, expected)


@pytest.mark.parametrize("what", ["submit", "cancel", "close"])
def test_ctrl_c_at_any_line_of_submit_cancel_close(parts, expected, what):
    interrupted, at, within = 0, 0, True
    while within:  # every eighth line, until the action has fewer lines
        with Engine(*parts, slots=2, max_len=128, chunk=32) as engine:
            others = [engine.submit(prompt, FEW) for prompt in PROMPTS]
            for _ in range(3):
                engine.step()
            doomed = engine.submit([9], FEW)
            acts = {
                "submit": lambda e=engine: e.submit([7, 8], FEW),
                "cancel": doomed.cancel,
                "close": engine.close,
            }
            within = interrupt(acts[what], at)
            interrupted += within
            if what == "close":
                engine.close()
                assert all(handle.finish_reason == "cancelled" for handle in (*others, doomed)), (
                    f"line {at}"
                )
            else:
                assert [handle.result(timeout=60).tokens for handle in others] == expected, (
                    f"line {at}"
                )
                assert doomed.result(timeout=60).finish_reason in ("length", "cancelled")
                assert is_whole(engine, expected), f"line {at}"
        at += 8
    assert interrupted > 5


# --- at random moments --------------------------------------------------------------------------


def press_after(seconds: float, act: Callable[[], object]) -> bool:
    """Press Ctrl-C after this many seconds. Return False if the action had finished by then."""
    press = threading.Timer(
        seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    )
    ended = False
    try:
        press.start()
        act()
        ended = True
        time.sleep(60)  # wait for the signal
    except KeyboardInterrupt:
        pass
    return not ended


@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_while_serving(engine, expected, seed):
    """Regression: after Ctrl-C at some lines of Python's Condition, its lock was not held any more, so the
    program ended with a RuntimeError and exit code 1."""
    handles = []

    def serve() -> None:
        with engine.serving():
            for prompt in PROMPTS:
                handles.append(engine.submit(prompt, FEW))
            for handle in handles:
                assert list(handle)
                handle.result()

    press_after(random.Random(seed).uniform(0.0, 0.04), serve)
    while any(thread.name == "nanobatch" for thread in threading.enumerate()):
        time.sleep(0.001)
    assert all(
        handle.result(timeout=60).tokens == tokens
        for handle, tokens in zip(handles, expected, strict=False)
    )
    assert is_whole(engine, expected)


def test_ctrl_c_at_any_line_of_a_wait(engine):
    """No other thread steps, so the signal itself has to wake the sleeping thread."""
    loop = engine.serving().start()
    loop.pause()
    handle = engine.submit([1], LONG)
    for at in range(30):  # up to the line where it sleeps
        assert interrupt(handle.result, at), f"line {at}"
    assert press_after(0.2, handle.result)
    loop.resume()
    assert handle.result(timeout=60).finish_reason == "length"
    assert loop.stop(10)
