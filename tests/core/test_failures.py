"""The engine fails visibly: a bug is shown with its file and line, and ends as few requests as possible."""

import gc
import re
import weakref
from collections.abc import Callable

import pytest
from checkpoints import make_checkpoint
from harness import check, exactly
from processes import python

import runner
from base.error_reports import describe, show_fault
from engine.snapshot import StepView
from kernels.device import mx
from nanobatch import Engine, QueueFull
from runner import ForwardBatch, Runner
from sched import Scheduler

LONG = exactly(30)
FEW = exactly(6)
# Part of a step -> the function that is made to raise
PARTS = {
    "plan": (Scheduler, "plan"),
    "a policy": (Scheduler, "_admissible"),
    "order": (ForwardBatch, "from_plan"),
    "forward": (runner, "forward"),
    "a sampler": (runner, "sample"),
    "runner": (Runner, "start_forward"),
    "choice": (Runner, "start_sampling"),
    "read": (runner.RunningStep, "read_back"),
    "commit": (Scheduler, "commit"),
    "record": (StepView, "from_commit"),
}


class Bug(RuntimeError):
    """Stands in for a fault in the engine's code."""


def bug(*args, **options):
    raise Bug("the device is on fire")


LINE = bug.__code__.co_firstlineno + 1  # the line that raises


def blocks(text: str) -> list[str]:
    return re.findall(
        r"^Traceback \(most recent call last\):$.*?^\S*Bug: the device is on fire$",
        text,
        re.M | re.S,
    )


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_exception_in_any_part_of_a_step(parts, monkeypatch, caplog, part, run_ahead):
    """The traceback names the line, and the next request is answered correctly."""
    sizes = {"slots": 2, "max_len": 128, "chunk": 32}
    with Engine(*parts, **sizes, run_ahead=run_ahead, speculate=0) as engine:
        expected = engine.submit([4, 5], FEW).result().tokens
        handles = [engine.submit([n], LONG) for n in (1, 2, 3)]
        for _ in range(3):
            engine.step()
        with monkeypatch.context() as broken:
            broken.setattr(*PARTS[part], bug)
            assert engine.step() is True
        first, second, in_line = handles
        for handle in (first, second):
            assert handle.finish_reason == "error" and isinstance(handle.exception, Bug)
            assert handle.result().error == "Bug: the device is on fire"
        # If nothing was planned or in flight, the engine does not know which request failed, so it ends them
        # all.
        all_end = not run_ahead and part in ("plan", "a policy")
        assert in_line.result().finish_reason == ("error" if all_end else "length")
        (block,) = blocks(caplog.text)
        assert f'File "{__file__}", line {LINE}, in bug' in block and "in step" in block
        assert "step" in caplog.messages[0] and "failed" in caplog.messages[0]
        check(engine)
        assert engine.submit([4, 5], FEW).result().tokens == expected


def test_policy_that_raises_at_submit(engine, monkeypatch, caplog):
    """Only the caller of submit gets the error."""
    running = engine.submit([1], LONG)
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.sched, "policy", engine.sched.policy._replace(room=bug))
        with pytest.raises(Bug):
            engine.submit([2], LONG)
    check(engine)
    assert running.result().finish_reason == "length" and not blocks(caplog.text)


class Panic(BaseException):
    """Stands in for a panic in the tokenizer's Rust code, which is not an Exception."""


def detokenize(monkeypatch, engine: Engine, **methods: Callable) -> None:
    """Replace these methods in the text streams of requests that are submitted from now on."""
    stream = engine.text.stream([])
    for name, method in methods.items():
        setattr(stream, name, method)
    monkeypatch.setattr(engine.text, "stream", lambda stops: stream)


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_detokenizer_that_raises(engine, monkeypatch, caplog, kind):
    """An exception in the detokenizer ends only its own request, and the traceback names the line."""
    expected = engine.submit([4, 5], LONG).result().tokens
    good = engine.submit([4, 5], LONG)

    def push(token: int) -> str:
        raise kind("no such character")

    with monkeypatch.context() as patch:
        detokenize(patch, engine, push=push)
        bad = engine.submit([6, 7], LONG)
    assert bad.result().finish_reason == "error" and "no such character" in bad.error
    assert isinstance(bad.exception, kind) and good.exception is None
    assert good.result().tokens == expected
    assert (
        f"request {bad.id} " in caplog.text
        and "in push" in caplog.text
        and caplog.text.count("Traceback") == 1
    )


@pytest.mark.parametrize("act", ["cancel", "close"])
def test_detokenizer_that_raises_at_the_end(engine, monkeypatch, caplog, act):
    """Regression: an exception while the last text was flushed made cancel and close fail."""
    detokenize(monkeypatch, engine, finish=bug)
    handle = engine.submit([1], LONG)
    engine.step()
    getattr(handle if act == "cancel" else engine, act)()
    assert handle.finish_reason == "cancelled" and len(blocks(caplog.text)) == 1


def test_two_failing_steps_are_both_shown(engine, monkeypatch, caplog):
    """If a step fails and the previous one cannot be read back, both errors are logged."""
    handle = engine.submit([1], LONG)
    engine.step(), engine.step()
    monkeypatch.setattr(runner, "forward", bug)
    monkeypatch.setattr(runner.RunningStep, "read_back", lambda self: 1 / 0)
    engine.step()
    assert handle.error == "Bug: the device is on fire"
    assert len(caplog.messages) == 2 and blocks(caplog.text) and "ZeroDivisionError" in caplog.text


def test_mistakes_of_users_have_no_traceback(engine, caplog):
    with pytest.raises(ValueError, match="slot holds"):
        engine.submit([1] * 127, LONG)
    engine.sched.max_queue = 1
    with pytest.raises(QueueFull):
        for n in range(9):
            engine.submit([n], LONG)
    assert caplog.text == ""


def test_failed_step_frees_its_memory(parts, monkeypatch):
    """The frames in the traceback refer to the slab. It is freed nevertheless, because a new one needs the
    memory."""
    gc.collect()
    gc.disable()
    try:
        with Engine(*parts, slots=2, max_len=128, chunk=32) as engine:

            def broken(model, ids, windows, logits_at):
                slab = engine.runner.slab  # noqa: F841
                try:
                    raise KeyError("first")
                except KeyError:
                    bug()

            slab = weakref.ref(engine.runner.slab)
            monkeypatch.setattr(runner, "forward", broken)
            handle = engine.submit([1], LONG)
            engine.step()
            monkeypatch.undo()
            engine.submit([1], FEW).result()
            assert slab() is None and isinstance(handle.exception, Bug)
    finally:
        gc.enable()


def test_exception_is_shown_with_its_causes(caplog):
    """The log message has one line, and the traceback contains all causes."""
    assert describe(KeyError("x")) == "KeyError: 'x'" and describe(MemoryError()) == "MemoryError"
    try:
        try:
            bug()
        except Bug as error:
            raise ValueError("because of it") from error
    except ValueError as error:
        show_fault("a test failed", error)
    assert caplog.messages == ["nanobatch: a test failed"]
    assert len(blocks(caplog.text)) == 1 and caplog.text.rstrip().endswith(
        "ValueError: because of it"
    )


def test_bug_in_forward_has_a_traceback(tmp_path):
    """The traceback appears even if logging is not set up, as when a user edits the code."""
    folder = make_checkpoint(tmp_path, seed=1)
    (tmp_path / "hacked.py").write_text(
        "def forward(model, ids, windows, logits_at):\n    return ids @ logits_at.nothing\n"
    )
    code = f"""
import hacked, runner
from nanobatch import Engine, SamplingParams
runner.forward = hacked.forward
with Engine.load({str(folder)!r}, slots=2, max_len=128) as engine:
    print(engine.submit([1], SamplingParams(max_tokens=3)).result().error)
"""
    done = python(code, PYTHONPATH=str(tmp_path))
    error = "AttributeError: 'list' object has no attribute 'nothing'"
    assert (done.returncode, done.stdout) == (0, f"{error}\n"), done.stderr
    first, *block = done.stderr.rstrip().splitlines()
    assert first == "nanobatch: step 1 failed" and block[0] == "Traceback (most recent call last):"
    assert f'  File "{tmp_path}/hacked.py", line 2, in forward' in block and block[-1] == error


def test_bug_in_forward_is_no_usage_error(tmp_path):
    """Regression: an exception in the first step, which runs while the model is loaded, was reported in one
    line, like a user's mistake."""
    folder = make_checkpoint(tmp_path, seed=1)
    (tmp_path / "hacked.py").write_text(
        "def forward(model, ids, windows, logits_at):\n    raise ValueError('shapes')\n"
    )
    code = f"""
import sys, hacked, runner, serve
runner.forward = hacked.forward
sys.exit(serve.main(["--model", {str(folder)!r}, "--port", "0"]))
"""
    done = python(code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "ValueError: shapes" in done.stderr
    assert f'File "{tmp_path}/hacked.py", line 2, in forward' in done.stderr


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_key_beyond_float16_is_an_error(tmp_path, part):
    """A key or value that float16 cannot represent ends the request with an error. An infinite key may get
    weight 0, which would silently make the answer wrong."""
    folder = make_checkpoint(tmp_path, seed=3, dtype=mx.bfloat16, attention_bias=True)
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    name = f"model.layers.0.self_attn.{part}.bias"
    weights[name] = mx.full(weights[name].shape, -1e5, mx.bfloat16)
    mx.save_safetensors(str(file), weights, {"format": "pt"})
    sampling = exactly(4)
    with Engine.load(folder, slots=2, max_len=128, chunk=32) as engine:
        for prompt in (list(range(9)), list(range(70))):  # in one chunk, and in three
            handle = engine.submit(prompt, sampling)
            handle.result()
            assert handle.finish_reason == "error"
            assert "--kv float32" in handle.error
    with Engine.load(folder, slots=2, max_len=128, chunk=32, kv="float32") as engine:
        assert len(engine.submit(list(range(70)), sampling).result().tokens) == 4
