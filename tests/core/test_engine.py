"""The engine's public interface: handles, bad input, threads, cancelling, closing, and no memory leaks."""

import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from harness import check, exactly
from processes import python
from waiting import wait_for

import runner
from kernels.device import mx
from models.load import read_model
from nanobatch import POLICIES, Engine, SamplingParams, Tokenizer
from sched import Scheduler

LONG = exactly(60)
FEW = exactly(12)


# --- handles ------------------------------------------------------------------------------------


def test_streamed_pieces_join_to_the_text(engine):
    handle = engine.submit("Hello", LONG)
    pieces = list(handle)
    result = handle.result()
    assert len(pieces) > 10 and "".join(pieces) == result.text == handle.text
    decoded = engine.text.tokenizer.decode(result.tokens)
    assert result.text == decoded[: len(result.text)]  # the rest may be an incomplete character


def test_metrics_say_what_happened(make_engine):
    """The clock advances by 1 each time it is read, so all durations are positive and ordered."""
    ticks = iter(range(10**6))
    engine = make_engine(slots=1, clock=lambda: float(next(ticks)))
    first, second = engine.generate([[1, 2, 3], [4, 5]], exactly(5))
    assert (
        first.metrics.prompt_tokens,
        first.metrics.output_tokens,
        first.metrics.cached_tokens,
    ) == (3, 5, 0)
    for metrics in (first.metrics, second.metrics):
        assert 0 < metrics.queued_s < metrics.ttft_s
        assert 0 < metrics.itl_mean_s <= metrics.itl_p95_s <= metrics.itl_max_s
        assert metrics.tokens_per_s == pytest.approx(1 / metrics.itl_mean_s)
    assert second.metrics.queued_s > first.metrics.queued_s


@pytest.mark.parametrize(("budget", "chunk"), [(8, 8), (1, 1), (8, 15), (1, 200)])
def test_small_budget(make_engine, budget, chunk):
    """Regression: with a chunk smaller than a segment of the prefix tree, an assertion ended all requests."""
    engine = make_engine(slots=2)
    alone = engine.generate([[*range(40)], [*range(30), 7]], FEW)
    engine.sched.prefixes.clear()
    engine.set_budget(budget, chunk)
    results = engine.generate([[*range(40)], [*range(30), 7]], FEW)
    assert [result.tokens for result in results] == [result.tokens for result in alone]


def test_budget_that_admits_nothing_is_refused(make_engine):
    """Regression: a budget or a chunk below 1 was accepted, and then no step was ever planned."""
    engine = make_engine(slots=2)
    for budget, chunk in ((0, 0), (0, 32), (-5, 32), (32, 0)):
        with pytest.raises(ValueError, match="it must be at least 1"):
            engine.set_budget(budget, chunk)
    with pytest.raises(ValueError, match="budget = -5"):
        Scheduler(2, 100, POLICIES["continuous"], budget=-5)
    assert engine.submit([1, 2, 3], FEW).result().finish_reason == "length"


def test_token_0_is_a_token_like_any_other(make_engine):
    """With run-ahead, the device passes each step's token to the next step, including token 0."""
    asked = exactly(5, logit_bias={0: 30.0}, logprobs=5)
    engine = make_engine(slots=1, prefix_cache=False, speculate=0)
    assert any(engine.submit([1], LONG).result().tokens)  # so that the slot has held other tokens
    ahead = engine.submit([7, 8], asked).result()
    engine.run_ahead = False
    assert ahead.tokens == [0] * 5
    assert ahead.logprobs == engine.submit([7, 8], asked).result().logprobs


def test_one_token_has_a_ttft_and_no_rate(engine):
    metrics = engine.submit([1], SamplingParams(max_tokens=1)).result().metrics
    assert metrics.ttft_s > 0 and metrics.tokens_per_s is None and metrics.itl_max_s is None


def test_eos_and_ignore_eos(parts):
    model, text = parts
    with Engine(model, text, slots=1, max_len=128, chunk=32) as engine:
        tokens = engine.submit([7, 8], LONG).result().tokens
        text.end_tokens, before = frozenset({tokens[4]}), text.end_tokens
        first = tokens.index(tokens[4])
        try:
            ended = engine.submit([7, 8], SamplingParams(max_tokens=60)).result()
            assert (ended.finish_reason, ended.tokens) == ("stop", tokens[: first + 1])
            assert engine.submit([7, 8], LONG).result().tokens == tokens
        finally:
            text.end_tokens = before


def test_generate_cleans_up_after_a_bad_prompt(engine):
    """Regression: the prompts before the bad one had been submitted, and kept running."""
    with pytest.raises(ValueError, match="272"):
        engine.generate([[1], [272]], LONG)
    snapshot = engine.snapshot()
    assert not snapshot.queue and all(slot.phase == "free" for slot in snapshot.slots)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ([272], r"272.*272"),
        ([-1], "-1"),
        ([1.5], "token ids"),
        ([True], "token ids"),
        (17, "int"),
        (b"hello", "bytes"),
        ([1] * 100, r"100.*60.*160.*128"),
    ],
)
def test_bad_prompt_is_refused_at_submit(engine, prompt, words):
    """A bad prompt raises at submit, and running requests continue undisturbed."""
    running = engine.submit([1, 2], LONG)
    engine.step()
    with pytest.raises(ValueError, match=words):
        engine.submit(prompt, LONG)
    assert running.result().finish_reason == "length"


def test_a_wrong_chunk_is_refused(parts):
    with pytest.raises(ValueError, match="chunk = 48"):
        Engine(*parts, chunk=48)


def test_client_must_be_a_string(engine):
    """A client that is not a string is refused at submit. One that is not hashable would fail the step that
    admits it."""
    with pytest.raises(ValueError, match="client is a list; give a text"):
        engine.submit([1, 2], client=["anna"])
    assert engine.submit([1, 2], SamplingParams(max_tokens=3), client="anna").result().finish_reason


def test_a_large_budget_takes_no_memory_at_start(parts):
    """Regression: arrays as wide as the budget took 9.3 GiB and 52 s, or raised an OverflowError.

    A step is never wider than one chunk per slot.
    """

    def peak(budget: int) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with Engine(*parts, slots=2, max_len=128, chunk=32, budget=budget):
            return mx.get_peak_memory() - before

    assert peak(2**31 - 1) < 2 * peak(64)


# --- threads ------------------------------------------------------------------------------------


def test_engine_is_thread_safe(engine):
    """Any thread may submit, read, step and cancel."""
    expected = engine.submit([1, 2, 3], LONG).result().tokens

    def is_right(number: int) -> bool:
        handle = engine.submit([1, 2, 3], LONG)
        if number % 3 == 2:
            handle.cancel()
            return handle.result(timeout=60).finish_reason in ("cancelled", "length")
        return handle.result(timeout=60).tokens == expected

    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(is_right, range(12))] == [True] * 12
    check(engine)


def test_serving_leaks_no_threads(engine):
    def serve_once():
        with engine.serving():
            engine.submit([1], SamplingParams(max_tokens=3)).result(timeout=60)

    def threads() -> int:
        return (
            len(os.listdir("/proc/self/task"))
            if sys.platform == "linux"
            else threading.active_count()
        )

    serve_once()
    before = threads()
    for _ in range(5):
        serve_once()
    wait_for(lambda: threads() <= before)  # the system still lists a finished thread for a moment


def test_submit_wakes_an_idle_engine(engine):
    with engine.serving():
        engine.submit([1], SamplingParams(max_tokens=3)).result(timeout=60)

        # The threads of a matrix product spin before they sleep, longer on a busy machine. A thread that
        # never sleeps uses much of each second.
        def is_asleep() -> bool:
            before = time.process_time()
            time.sleep(1.0)
            return time.process_time() - before < 0.1

        wait_for(is_asleep)
        assert (
            engine.submit([1], SamplingParams(max_tokens=3)).result(timeout=60).finish_reason
            == "length"
        )


def test_result_gives_up_when_its_time_is_over(engine):
    handle = engine.submit([1], LONG)
    with pytest.raises(TimeoutError, match="0"):
        handle.result(timeout=0)
    assert handle.result(timeout=60).finish_reason == "length"


def test_first_token_is_read_at_once_on_cpu(engine):
    """On a CPU, starting the next step takes nearly as long as running it, so the token is read first."""
    running = engine.submit([1] * 8, exactly(40))
    engine.step()
    assert len(running.tokens) == 1
    engine.step()
    assert len(running.tokens) == 1  # the second token is read after the third step has started
    late = engine.submit([2] * 8, FEW)
    engine.step()
    assert (len(running.tokens), len(late.tokens)) == (3, 1)


# --- cancelling, closing, step times ------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "run_ahead"), [(0, True), (1, False), (3, True), (4, False), (9, True)]
)
def test_cancel_frees_the_slot_in_every_phase(make_engine, steps, run_ahead):
    engine = make_engine(slots=1, budget=1, run_ahead=run_ahead)
    expected = engine.submit([9, 9], FEW).result().tokens
    doomed = engine.submit([1] * 90, exactly(4))
    for _ in range(steps):
        engine.step()
    heir = engine.submit([9, 9], FEW)
    doomed.cancel()
    doomed.cancel()
    check(engine)
    engine.step()
    assert heir.request.slot == 0
    assert heir.result().tokens == expected
    assert doomed.result().finish_reason == ("cancelled" if len(doomed.tokens) < 4 else "length")


def test_close_ends_every_handle(parts):
    """Regression: a thread that waited for a result was not woken when the engine was closed. Later requests
    are refused."""
    engine = Engine(*parts, slots=1, max_len=128)
    with engine.serving():
        handles = [engine.submit([n], LONG) for n in range(4)]
        waiter = threading.Thread(target=lambda: handles[3].result())
        waiter.start()
        engine.close()
        engine.close()
        waiter.join(60)
        assert not waiter.is_alive()
    assert all(
        handle.result(timeout=60).finish_reason in ("cancelled", "length") for handle in handles
    )
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1], LONG)
    with pytest.raises(RuntimeError, match="closed"), engine.serving():
        pass
    assert engine.step() is False


STATES = {
    "in a fault": "engine.submit([1], LONG); engine.step(); 1 / 0",
    "by sys.exit while serving": "s = engine.serving(); s.__enter__(); engine.submit([1], LONG); sys.exit(7)",
}


@pytest.mark.parametrize("state", STATES)
def test_a_process_exits_cleanly_in_every_state(tmp_path_factory, state):
    folder = make_checkpoint(tmp_path_factory.mktemp("exit"), hidden_size=128, num_hidden_layers=4)
    code = f"""
import sys
from nanobatch import Engine, SamplingParams
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
engine = Engine.load({str(folder)!r}, slots=2, max_len=128)
{STATES[state]}
"""
    done = python(code)
    assert done.returncode == {"in a fault": 1}.get(state, 7), done.stderr


@pytest.mark.parametrize("run_ahead", [True, False])
def test_step_times_add_up(make_engine, monkeypatch, run_ahead):
    """Regression: the device's time was counted as build time, so Python looked slow."""
    now = 0.0
    spent = Counter()

    def takes(seconds, owner, name):
        """Make each call of a function advance the clock by this many seconds."""
        real = getattr(owner, name)

        def slow(*args, **options):
            nonlocal now
            result = real(*args, **options)
            if result is not None or name != "plan":  # an empty plan belongs to no step
                now += seconds
                spent[name] += seconds
            return result

        monkeypatch.setattr(owner, name, slow)

    engine = make_engine(run_ahead=run_ahead, clock=lambda: now)
    takes(1, engine.sched, "plan")
    takes(10, runner, "forward")
    takes(100, mx, "async_eval")
    takes(1000, mx, "eval")
    takes(10_000, engine.sched, "commit")
    handles = [engine.submit([n] * 20 * n, exactly(6)) for n in (1, 2, 3)]
    while engine.step():
        pass
    steps = engine.snapshot().steps
    assert all(handle.finish_reason == "length" for handle in handles) and len(steps) > 6
    assert sum(step.plan_s for step in steps) == spent["plan"] == len(steps)
    assert sum(step.build_s for step in steps) == spent["forward"]
    assert sum(step.device_s for step in steps) == spent["async_eval"]
    assert sum(step.wait_s for step in steps) == spent["eval"]
    assert sum(step.commit_s for step in steps) == spent["commit"]
    assert sum(step.seconds for step in steps) == sum(spent.values()) == now
    for step in steps:
        assert step.python_s == step.plan_s + step.build_s + step.commit_s
        if not run_ahead:
            assert step.seconds == step.ended - step.began


# --- memory -------------------------------------------------------------------------------------


def test_dropped_engine_frees_its_slab(parts):
    """A closed engine is in no reference cycle, so its slab is freed with the last reference. The cycle
    collector does not know how large a slab is, and may run much too late."""
    gc.collect()
    gc.disable()
    try:
        engine = Engine(*parts, slots=2, max_len=128, chunk=32)
        with engine.serving():
            engine.generate(
                ["one", [2, 2], [3]], SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True)
            )
        with pytest.raises(ValueError, match="empty"):
            engine.submit("")
        engine.submit([4], LONG).cancel()
        assert len(engine.snapshot().ended) == 4
        engine.close()
        slab = weakref.ref(engine.runner.slab)
        del engine
        assert slab() is None
    finally:
        gc.enable()


def rss() -> int:
    """Return this process's resident set size in bytes on Linux, and MLX's active memory elsewhere."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return mx.get_active_memory()


def test_decoding_leaks_no_memory(parts):
    """Decode two answers of 500 tokens in the same steps. A single copy of one layer's slab would show in the
    peak. A step may leak at most 200 bytes of MLX's memory and 10,000 bytes of resident memory."""
    sizes = {"slots": 2, "max_len": 16_384, "chunk": 64}
    with Engine(*parts, **sizes, speculate=0) as engine:
        engine.generate([[1, 2, 3]] * 2, exactly(300))
        one_layer = engine.runner.slab.arrays[0].nbytes
        mx.reset_peak_memory()
        gc.collect()
        active, resident = mx.get_active_memory(), rss()
        before = engine.registry.steps.count
        engine.generate([[1, 2, 3]] * 2, exactly(501))
        assert engine.registry.steps.count - before >= 500
        assert mx.get_peak_memory() - active < one_layer, "the slab was copied"
        assert abs(mx.get_active_memory() - active) < 200 * 500
        gc.collect()  # garbage does not count as a leak
        assert rss() - resident < 10_000 * 500
        engine.runner.slab.check()


def count_copies(folder: Path) -> tuple[int, int]:
    """Return the number of steps in which MLX allocated a whole layer of the slab, and of steps in which
    a chunk copied rows.

    The hardest case is a chunk that copies another slot's rows while the previous pass still reads the
    slab. Here two such prompts follow each opening, each next to an unrelated prompt. One layer with wide
    projections makes the previous pass slow.
    """
    model = read_model(folder)
    say = exactly(12)
    with Engine(
        model, Tokenizer(folder, model.config.V), slots=5, max_len=16_384, chunk=64, budget=400
    ) as engine:
        copies, orders, begin = 0, [], engine.runner.start_forward
        engine.runner.start_forward = lambda order: orders.append(order) or begin(order)
        for seed in range(2):
            opening = [(seed * n) % 250 for n in range(1, 65)]
            handles = [engine.submit([*opening, 1], say)]
            before = mx.get_active_memory()
            while any(handle.finish_reason is None for handle in handles):
                if len(handles) < 5 and len(handles[0].tokens) % 3 == 2:
                    handles.append(engine.submit([251, *[seed, len(handles)] * 25], say))
                    handles.append(engine.submit([*opening, len(handles), 3], say))
                mx.reset_peak_memory()
                engine.step()
                copies += mx.get_peak_memory() - before > engine.runner.slab.arrays[0].nbytes
    return copies, sum(
        any(prefill.copied_from is not None for prefill in order.prefills) for order in orders
    )


def test_no_step_copies_the_slab(tmp_path, monkeypatch):
    """MLX copies an array that is written while a running pass still reads it, so each pass waits for the
    previous one."""
    wide = {"hidden_size": 1024, "num_attention_heads": 32, "head_dim": 128}
    folder = make_checkpoint(tmp_path, num_hidden_layers=1, intermediate_size=64, **wide)
    assert count_copies(folder) == (0, 4)

    monkeypatch.setenv("NANOBATCH_WAIT", "off")
    copies, _ = count_copies(folder)
    assert copies > 0
