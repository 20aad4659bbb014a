"""Stage 8: run-ahead. You write `Runner.start_sampling` in runner.py, `Engine._may_stay_in_flight` and
`Engine.step` in nanobatch.py."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from course.from_zero.shared_by_tests import (
    SEED,
    SUM,
    Tale,
    ask,
    demo,
    ids_of,
    new_engine,
    run_all,
    steps_for,
)
from kernels.device import device_lock, mx
from models.memory import Sizes
from nanobatch import SamplingParams
from runner import ForwardBatch, Prefill, Runner, RunningStep
from sampling import SamplingRow


def starts_and_reads(run_ahead: bool, eager_first_token: bool, later: bool = False) -> list[str]:
    """Return the starts and reads of an answer of four tokens, in order.

    `later`: another prompt arrives after two steps.
    """
    lines: list[str] = []

    def note(what: str) -> None:
        lines.append(f"{what} {1 + sum(line.startswith(what) for line in lines)}")

    read_back = RunningStep.read_back

    def noted(step: RunningStep) -> tuple:
        note("read")
        return read_back(step)

    with pytest.MonkeyPatch.context() as patch, new_engine(slots=2, run_ahead=run_ahead) as engine:
        finish = engine.runner.start_sampling

        def finish_too(*rest) -> RunningStep:
            step = finish(*rest)
            note("start")
            return step

        engine.runner.start_sampling = finish_too
        patch.setattr(RunningStep, "read_back", noted)
        engine.eager_first_token = eager_first_token
        handle = ask(engine, max_tokens=4)
        if later:
            engine.step()
            engine.step()
            ask(engine, max_tokens=1)
        run_all(engine)
        assert len(handle.tokens) == 4
    return lines


@pytest.mark.about("_may_stay_in_flight", "step")
def test_without_run_ahead():
    """Without run-ahead, a step is read before the next one starts."""
    in_turn = ["start 1", "read 1", "start 2", "read 2", "start 3", "read 3", "start 4", "read 4"]
    assert starts_and_reads(run_ahead=False, eager_first_token=False) == in_turn


@pytest.mark.about("_may_stay_in_flight", "step", "start_sampling")
def test_run_ahead():
    """With run-ahead, the next step starts before the last one is read."""
    ahead = ["start 1", "start 2", "read 1", "start 3", "read 2", "start 4", "read 3", "read 4"]
    assert starts_and_reads(run_ahead=True, eager_first_token=False) == ahead


@pytest.mark.about("_may_stay_in_flight", "step")
def test_first_token():
    """With `eager_first_token`, a first token is read immediately, like all steps before it."""
    first = ["start 1", "read 1", "start 2", "start 3", "read 2", "start 4", "read 3", "read 4"]
    assert starts_and_reads(run_ahead=True, eager_first_token=True) == first
    both = ["start 1", "read 1", "start 2", "start 3", "read 2", "read 3", "start 4", "read 4"]
    assert starts_and_reads(run_ahead=True, eager_first_token=True, later=True) == both


@pytest.mark.about("start_sampling")
def test_flight():
    """A started step returns a token for each slot that yields one, and -1 for the others."""
    runner = Runner(demo()[0], Sizes(slots=3, max_len=128, chunk=32, budget=64))
    enqueue = runner._enqueue
    started: list[object] = []
    runner._enqueue = lambda *results: (started.extend(results), enqueue(*results))
    order = ForwardBatch((), [Prefill(1, ids_of(), 0, emits=True)], [])
    step = runner.start_forward(order)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((mx, "eval"), (mx.array, "item"), (mx.array, "tolist")):
            patch.setattr(
                owner, name, lambda *_: pytest.fail("`start_sampling` waits for the device")
            )
        flight = runner.start_sampling(
            step, {1: [SamplingRow(1, SamplingParams(), seed=0, index=0)]}
        )
    assert any(each is flight.tokens for each in started), (
        "the tokens were never handed to self._enqueue: the device would start too late"
    )
    tokens, _ = flight.read_back()
    assert [tokens[0], tokens[2]] == [[-1], [-1]]
    assert runner._newest.tolist() == [0, *tokens[1], 0], "the newest token of each slot"
    times = (flight.build_s, flight.device_s, flight.wait_s)
    assert all(isinstance(each, float) and each >= 0 for each in times), times
    chunk = ForwardBatch((), [Prefill(0, ids_of()[:4], 0, emits=False)], [])
    flight = runner.run(chunk, {})
    flight.read_back()
    assert flight.finite == [0], "`step.proofs` say that the rows of a chunk are finite"


def test_ghosts():
    """A ghost's token is dropped: A ends with its second token, but runs once more."""
    tale = Tale(slots=1, lag=1)
    first = tale.submit(3, 9, eos=2)
    tale.submit(3, 2)
    tale.should_be("""
         1 | A:p
         2 | A:d
         3 | A:d
         4 | B:p
         5 | B:d
    """)
    assert len(first.answer) == 2


def test_a_ghost_of_nan():
    """A ghost with non-finite numbers does not affect the others."""
    tale = Tale(slots=1, lag=1)
    tale.fails.add(tale.submit(3, 9).id)
    second = tale.submit(2, 2)
    tale.drawn()
    assert second.finish_reason == "length"


@pytest.mark.about("step")
def test_failure():
    """A step that fails ends its requests, and the engine goes on."""
    with new_engine(slots=2) as engine:
        begin = engine.runner.start_forward
        engine.runner.start_forward = lambda order: 1 // 0
        handle = ask(engine)
        try:
            worked = engine.step()
        except ZeroDivisionError:
            pytest.fail("it escaped from Engine.step: pass it to self._fail", pytrace=False)
        assert worked is True
        assert handle.finish_reason == "error"
        engine.runner.start_forward = begin
        steps_for(engine, [SUM])


@pytest.mark.about("step")
def test_exit():
    """SystemExit ends the requests, too, and is raised again to end the program."""

    def leave(order: ForwardBatch) -> None:
        raise SystemExit(3)

    with new_engine(slots=2) as engine:
        engine.runner.start_forward = leave
        handle = ask(engine)
        with pytest.raises(SystemExit):
            engine.step()
        assert handle.finish_reason == "error"


@pytest.mark.about("step")
def test_lock():
    """While a step runs, no other thread can take device_lock."""
    taken = []
    with new_engine(slots=2) as engine, ThreadPoolExecutor(1) as other:
        begin = engine.runner.start_forward

        def look_and_begin(order: ForwardBatch):
            taken.append(other.submit(device_lock.acquire, blocking=False).result())
            return begin(order)

        engine.runner.start_forward = look_and_begin
        ask(engine, max_tokens=1)
        run_all(engine)
    assert taken == [False]


@pytest.mark.about("step")
def test_plan_false():
    """`plan=False` plans nothing, but the step in flight is read."""
    with new_engine(slots=1) as engine:
        engine.eager_first_token = False
        commits: list = []
        engine.on_commit = commits.append
        handle = ask(engine)
        engine.step()
        assert engine.step(plan=False) is True, "something was in flight"
        assert len(handle.tokens) == 1
        assert len(commits) == 1, "`_changing` calls on_commit"
        assert engine.step(plan=False) is False, "nothing was"
        run_all(engine)


def test_batch_invariance():
    """Each answer is the same in a batch as alone."""
    dice = random.Random(SEED or 3)
    asks = []
    for number in range(16):
        warm = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
        ids = [dice.randrange(5, 1500) for _ in range(dice.randint(1, 60))]
        tokens = dice.randint(1, 10)
        asks.append((ids, SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=3, **warm)))
    with new_engine(slots=5, budget=48) as engine:
        together = [engine.submit(*each) for each in asks]
        run_all(engine)
    alone = []
    with new_engine(slots=1, policy="serial", run_ahead=False) as engine:
        for each in asks:
            alone.append(engine.submit(*each))
            run_all(engine)
    assert [handle.tokens for handle in together] == [handle.tokens for handle in alone]
    same = sum(a.logprobs == b.logprobs for a, b in zip(together, alone, strict=True))
    print(f"{len(asks)} answers in a batch and alone: the same tokens, {same} with the same bits")
