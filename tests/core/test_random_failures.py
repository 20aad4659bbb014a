"""Every request ends exactly once, with a reason, whatever fails, and later requests are answered correctly."""

from dataclasses import replace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import check, exactly
from processes import python
from soak import SOAK, soak

import nanobatch
import runner
from kernels.device import mx
from nanobatch import Engine, SamplingParams

LONG = exactly(30)
FEW = exactly(6)


def test_soak(parts):
    """NANOBATCH_SOAK=10000 runs the long form, which also checks memory."""
    requests = SOAK or 250
    counts = soak(*parts, requests, seed=1)
    assert counts["refused"] > requests / 80 and counts["cancelled"] > requests / 7
    assert counts["compared"] > requests / 3 and counts["wrong"] == 0


# --- exceptions ---------------------------------------------------------------------------------

CALLS = [
    "forward",
    "Runner.start_sampling",
    "Runner._start",
    "Runner._copy_prefix",
    "Slab.bucket",
    "mx.eval",
    "mx.async_eval",
]


@pytest.mark.parametrize(
    ("target", "run_ahead"), [(call, i % 2 == 0) for i, call in enumerate(CALLS)]
)
def test_exception_at_any_call(parts, monkeypatch, target, run_ahead):
    """Every request ends, with the error or complete, and the next request is answered correctly."""
    owner, _, name = target.rpartition(".")
    owner = (
        mx
        if owner == "mx"
        else getattr(runner, owner, None) or getattr(nanobatch, owner)
        if owner
        else runner
    )
    real = getattr(owner, name)
    failures = 0
    model, text = parts
    by_formula = replace(model, attention="formula")  # fused attention uses no buckets
    with (
        Engine(by_formula, text, slots=2, max_len=128, chunk=32, run_ahead=run_ahead) as engine,
        engine.serving(),
    ):
        expected = engine.submit([4, 5], FEW).result(timeout=60).tokens
        for fails_at in range(12):
            calls = iter(range(10**6))

            def failing(*args, calls=calls, fails_at=fails_at, **options):
                if next(calls) == fails_at:
                    raise RuntimeError("the device is on fire")
                return real(*args, **options)

            monkeypatch.setattr(owner, name, failing)
            handles = [engine.submit([n] * 20 * n, exactly(4)) for n in (1, 2, 3)]
            results = [handle.result(timeout=60) for handle in handles]
            monkeypatch.setattr(owner, name, real)
            failed = [result for result in results if result.finish_reason == "error"]
            failures += len(failed)
            assert all("the device is on fire" in result.error for result in failed)
            assert all(result.finish_reason in ("error", "length") for result in results)
            check(engine)
            assert engine.submit([4, 5], FEW).result(timeout=60).tokens == expected
    assert failures >= 5


def test_failing_step_spares_a_finished_answer(make_engine, monkeypatch):
    """A's third and last token is in flight when the next step, which contains only B, cannot be built. Only
    B fails."""
    engine = make_engine(speculate=0)
    expected = engine.submit([1, 2], exactly(3)).result().tokens
    a = engine.submit([1, 2], exactly(3))
    b = engine.submit([3, 4], LONG)
    while a.request.planned < 3:
        engine.step()
    assert len(a.tokens) < 3
    monkeypatch.setattr(runner, "forward", lambda *args: 1 / 0)
    engine.step()
    assert a.result(timeout=60).tokens == expected and a.finish_reason == "length"
    assert b.finish_reason == "error" and "ZeroDivisionError" in b.error


@pytest.mark.parametrize("run_ahead", [True, False])
def test_unstarted_requests_retry_in_order(make_engine, monkeypatch, run_ahead):
    """The budget allows one chunk a step. A's chunk fails. B, which is in a slot, and C to E, which are
    queued, run afterwards in their order of arrival."""
    prompts = [[n] * 40 for n in range(1, 6)]
    engine = make_engine(budget=1, run_ahead=run_ahead)
    expected = engine.generate(prompts, LONG)
    handles = [engine.submit(prompt, LONG) for prompt in prompts]
    with monkeypatch.context() as broken:
        broken.setattr(runner, "forward", lambda *args: 1 / 0)
        engine.step()
    a, b, *line = handles
    assert (
        a.finish_reason == "error"
        and b.request.phase == "queued"
        and engine.snapshot().waiting == 4
    )
    check(engine)
    results = [handle.result(timeout=60) for handle in handles[1:]]
    assert [result.tokens for result in results] == [result.tokens for result in expected[1:]]
    assert [handle.id for handle in sorted(handles[1:], key=lambda handle: handle.times[0])] == [
        b.id,
        *(handle.id for handle in line),
    ]
    assert all(
        result.metrics.output_tokens == 30 and result.metrics.ttft_s > 0 for result in results
    )


def test_no_memory_for_a_new_slab(engine, monkeypatch):
    """While no slab can be allocated, every waiting thread gets an error. Afterwards the engine works again."""
    expected = engine.submit([4, 5], LONG).result().tokens
    with engine.serving():
        with monkeypatch.context() as broken:
            broken.setattr(runner, "forward", lambda *args: 1 / 0)
            broken.setattr(
                runner, "Slab", lambda *args: (_ for _ in ()).throw(MemoryError("no room"))
            )
            handles = [engine.submit([4, 5], LONG) for _ in range(5)]
            assert all(handle.result(timeout=60).finish_reason == "error" for handle in handles)
        assert engine.submit([4, 5], LONG).result(timeout=60).tokens == expected
    check(engine)


# --- program exit -------------------------------------------------------------------------------


def test_exit_while_loading(tmp_path):
    """Regression: a process aborted or hung if it exited while MLX was computing."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    large = make_checkpoint(tmp_path, **sizes)
    code = f"""
import threading, time
from nanobatch import Engine
threading.Thread(target=Engine.load, args=({str(large)!r},), daemon=True).start()
time.sleep(0.2)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


# --- found by trying to break it ----------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_k": 2**63},
        {"temperature": 10**6},
        {"temperature": 1e-46},
        {"logit_bias": {5: 10**9}},
    ],
)
def test_extreme_settings_disturb_no_other_request(engine, settings):
    expected = engine.submit([1, 2], LONG).result().tokens
    odd, good = (
        engine.submit([1, 2], SamplingParams(max_tokens=9, **settings)),
        engine.submit([1, 2], LONG),
    )
    assert odd.result().finish_reason in ("length", "stop") and good.result().tokens == expected
    if settings == {"temperature": 1e-46}:
        assert odd.tokens == expected[: len(odd.tokens)]


def test_submitted_settings_are_immutable(engine):
    """Regression: a caller could change a list after it had been validated."""
    bias = {5: 1.0}
    sampling = SamplingParams(logit_bias=bias)
    bias[100_000] = 1.0
    assert dict(sampling.logit_bias) == {5: 1.0}
    with pytest.raises(TypeError):
        sampling.logit_bias[100_000] = 1.0


def test_infinite_timeout(engine):
    with engine.serving():
        assert engine.submit([1], LONG).result(timeout=float("inf")).finish_reason == "length"


@pytest.mark.parametrize(("value", "at"), [(np.nan, 10), (np.inf, 40), (-np.inf, 70)])
def test_non_finite_rows_are_not_cached(parts, value, at):
    """The chunks before the bad row are cached, and the next request in the slot gets the same answer as
    alone."""
    model, text = parts
    weight = np.array(model.table.weight)
    weight[99, 0] = value
    spoiled = replace(model, table=model.table._replace(weight=mx.array(weight)))
    good = [n % 90 for n in range(130)]
    with Engine(spoiled, text, slots=1, max_len=256, chunk=32, budget=1) as engine:
        settings = exactly(20, logit_bias={99: -100})
        alone = engine.submit(good, settings).result().tokens
        engine.submit([5], settings).result()
        bad = engine.submit([*good[:at], 99, *good[at:]], settings)
        for _ in range(4):
            engine.step()
        bad.cancel()
        again = engine.submit(good, settings).result()
        assert again.metrics.cached_tokens == at // 32 * 32 and again.tokens == alone
