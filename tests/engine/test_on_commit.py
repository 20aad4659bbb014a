"""`engine.on_commit`: when it is called, without a lock, and what it may do."""

import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import harness
import pytest
from harness import exactly
from long_forms import number_of
from waiting import wait_for

import runner
from engine.loop import Loop
from kernels.device import device_lock
from nanobatch import Engine, Handle

ROOT = Path(__file__).parents[2]
LONG = exactly(30)
SHORT = exactly(3)


class Hook:
    """An `on_commit` that records what is visible in each call, and checks that another thread can take the
    engine's locks."""

    def __init__(self, engine: Engine):
        self.engine, self.calls, self.threads = engine, [], []
        engine.on_commit = self

    def __call__(self, handles) -> None:
        taken = []

        def take() -> None:
            with device_lock:
                taken.append(self.engine.snapshot())

        other = threading.Thread(target=take)
        other.start()
        other.join(60)
        (look,) = taken  # raises if the engine was locked
        self.calls.append((look.output_tokens, [view.id for view in look.ended]))
        self.threads.append(threading.current_thread().name)

    @property
    def ended(self) -> list[int]:
        return self.calls[-1][1]


def test_hook_sees_each_token_within_its_step(make_engine):
    """By the time `step` returns, `on_commit` has been called for each token."""
    engine = make_engine(run_ahead=False)
    hook = Hook(engine)
    handles = [engine.submit([n], SHORT) for n in (1, 2)]
    seen = []
    while engine.step():
        seen.append(sum(len(handle.tokens) for handle in handles))
    assert [tokens for tokens, _ in hook.calls] == seen == [2, 4, 6], (
        "once a step, however many tokens it has"
    )
    assert hook.ended == [1, 2]


@pytest.mark.parametrize(
    "way", ["length", "stop", "cancel in line", "cancel in a slot", "failed step", "close"]
)
def test_hook_sees_every_end(parts, monkeypatch, way):
    engine = Engine(*parts, slots=1, max_len=128, chunk=32)
    stop = engine.submit([1, 2], LONG).result().tokens[3]
    hook = Hook(engine)
    first = engine.submit([1, 2], exactly(9, stop=[stop] if way == "stop" else ()))
    behind = engine.submit([3], SHORT)
    engine.step()
    if way in ("length", "stop"):
        first.result()
    elif way == "cancel in line":
        behind.cancel()
        first = behind
    elif way == "cancel in a slot":
        first.cancel()
    elif way == "failed step":
        monkeypatch.setattr(runner, "forward", lambda *args: 1 / 0)
        engine.step()
    else:
        engine.close()
        assert behind.id in hook.ended
    assert first.finish_reason is not None and first.id in hook.ended
    count = len(hook.calls)
    first.cancel()
    assert len(hook.calls) == count, "a second cancel calls the hook"
    engine.close()


def test_hook_runs_in_the_committing_thread(engine):
    """The hook runs in the thread that steps, or in the one that ends a request."""
    hook = Hook(engine)
    with engine.serving():
        handle = engine.submit([1], SHORT)
        handle.result(timeout=60)
    assert set(hook.threads) == {"nanobatch"}
    engine.submit([1], SHORT).cancel()
    assert hook.threads[-1] == threading.current_thread().name


def test_failing_hook_is_logged(engine, caplog):
    """The traceback is logged, and nothing else is disturbed."""
    expected = engine.submit([1, 2], LONG).result().tokens
    before = engine.snapshot()

    def broken(handles) -> None:
        raise KeyError("I do not want to hear it")

    engine.on_commit = broken
    assert engine.submit([1, 2], LONG).result().tokens == expected
    engine.submit([1, 2], LONG).cancel()
    faults = engine.snapshot(before).faults
    assert len(faults) >= 30 and all("I do not want to hear it" in fault for fault in faults)
    assert f'{__file__}", line' in caplog.text and "in broken" in caplog.text


def test_slow_hook_blocks_no_other_thread(engine):
    """Other threads submit, cancel and take snapshots while the hook runs."""
    inside, go = threading.Event(), threading.Event()

    def slow(handles) -> None:
        inside.set()
        go.wait(60)

    engine.on_commit = slow
    with engine.serving():
        first = engine.submit([1], LONG)
        assert inside.wait(60)
        second = engine.submit([2], LONG)
        assert engine.snapshot().submitted == 2 and len(first.tokens) >= 1
        engine.on_commit = None
        second.cancel()
        assert (
            second.result(timeout=60).finish_reason == "cancelled" and first.finish_reason is None
        )
        go.set()
        assert first.result(timeout=60).finish_reason == "length"


def test_hook_may_close_the_engine(parts):
    """All requests end, and no thread hangs."""
    engine = Engine(*parts, slots=2, max_len=128, chunk=32)
    engine.on_commit = lambda handles: engine.close()
    handles = [engine.submit([n], LONG) for n in range(4)]
    with engine.serving():
        assert all(handle.result(timeout=60).finish_reason == "cancelled" for handle in handles)


# --- a storm ------------------------------------------------------------------------------------

STORM = number_of("STORM", 400)  # number of requests
THREADS = 16
BRIEF = exactly(2)


def fail(error: BaseException) -> None:
    raise error


# Actions that an `on_commit` of `engine` tries while `other` is served, too. These fail and are recorded as
# faults:
FAILS = {
    "wait": lambda engine, other: engine.submit([7], BRIEF).result(),
    "iterate": lambda engine, other: list(engine.submit([7], BRIEF)),
    "generate": lambda engine, other: engine.generate([[1], [2]], BRIEF),
    "serve": lambda engine, other: engine.serving().start(),
    "raise": lambda engine, other: fail(ValueError("bad")),
    "exit": lambda engine, other: sys.exit(3),
    "end a generator": lambda engine, other: fail(GeneratorExit()),
    "end an iterator": lambda engine, other: next(iter(())),
    "press Ctrl-C": lambda engine, other: fail(KeyboardInterrupt()),
}
# These do not fail:
DOES = {
    "nothing": lambda engine, other: None,
    "step": lambda engine, other: engine.step(),
    "step another engine": lambda engine, other: other.step(),
    "look": lambda engine, other: engine.snapshot(other.snapshot() and engine.snapshot()),
    "submit": lambda engine, other: engine.submit([7], BRIEF),
    "submit to another engine": lambda engine, other: other.submit([7], BRIEF),
    "submit to another engine and cancel": lambda engine, other: other.submit([7], BRIEF).cancel(),
    "drain": lambda engine, other: engine.drain("continuous"),
}
ACTS = FAILS | DOES


class Storm:
    """An `on_commit` that runs a random action in a quarter of its calls from the serving thread."""

    def __init__(self, engine: Engine, loop: Loop, other: Engine, seed: str):
        self.engine, self.loop, self.other = engine, loop, other
        self.dice, self.acts = random.Random(seed), Counter()
        engine.on_commit = self

    def __call__(self, handles) -> None:
        if not self.loop.is_here or self.dice.random() > 0.25:
            return  # other threads are allowed to wait, so the actions that should fail would block
        name = self.dice.choice(list(ACTS))
        self.acts[name] += 1
        ACTS[name](self.engine, self.other)


def check(handle: Handle, expected: list[int], was_cancelled: bool) -> str | None:
    """Return what is wrong with the result, or None."""
    result = handle.result(timeout=60)
    reasons = {"length", "cancelled"} if was_cancelled else {"length"}
    if result.finish_reason not in reasons:
        return f"it ended by {result.finish_reason}, not {reasons}: {result.error}"
    whole = expected if result.finish_reason == "length" else expected[: len(result.tokens)]
    return None if result.tokens == whole else f"{result.tokens}, but alone {expected}"


def test_storm(parts):
    """Each request gets the same tokens as alone, each exception of a hook is recorded, all slots become
    free, and both loops stop. NANOBATCH_STORM=5000 runs the long form."""
    sizes = {"slots": 4, "max_len": 64, "chunk": 32}
    with Engine(*parts, **sizes) as engine:
        asks = [([n, 3], exactly(4 + n)) for n in range(9)]
        alone = [engine.submit(*ask).result().tokens for ask in asks]
    seen, wrong = [], []

    def client(number: int) -> None:
        dice = random.Random(number)
        for n in range(number, STORM, THREADS):
            case = n % len(asks)
            handle = dice.choice(engines).submit(*asks[case])
            cancels = dice.random() < 0.2
            if cancels:
                time.sleep(dice.random() * 0.02)
                handle.cancel()
            if line := check(handle, alone[case], cancels):
                wrong.append(line)
            seen.append(n)

    with Engine(*parts, **sizes) as one, Engine(*parts, **sizes) as two:
        engines, loops = [one, two], [one.serving().start(), two.serving().start()]
        hooks = [Storm(one, loops[0], two, "one"), Storm(two, loops[1], one, "two")]
        threads = [
            threading.Thread(target=client, args=[number], daemon=True) for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not wrong and sorted(seen) == list(range(STORM))
        one.on_commit = two.on_commit = None
        wait_for(lambda: is_at_rest(one) and is_at_rest(two))
        assert all(loop.stop(30) for loop in loops)
    acts: Counter[str] = sum((hook.acts for hook in hooks), Counter())
    assert set(acts) == set(ACTS)
    faults = 0
    for engine in engines:
        harness.check(engine)
        faults += engine.snapshot().seen.faults
    assert faults >= sum(acts[name] for name in FAILS if name != "serve")


def is_at_rest(engine: Engine) -> bool:
    look = engine.snapshot()
    return all(slot.request is None for slot in look.slots) and look.submitted == look.finished
