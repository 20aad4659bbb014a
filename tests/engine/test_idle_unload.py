"""An engine unloads its weights and its slab, and loads them again or loads another model."""

import gc
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import check, exactly
from long_forms import number_of
from slow_folder import slow_folder
from word_engine import Clock

from engine.idle_unload import Idle
from kernels import device
from kernels.device import mx
from models.forward_cost import nbytes_of
from models.memory import Sizes, slab_of
from nanobatch import Engine, ModelError, SamplingParams

EXCHANGES = number_of("EXCHANGES", 6)
PROMPTS = [[60 + n, 3, 9, n, 200 - n] * (1 + n % 4) for n in range(12)]
SIZES = {"slots": 2, "max_len": 128, "chunk": 32}
GREEDY = exactly(6)
SHAPES = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Two models, the second one quantized."""
    root = tmp_path_factory.mktemp("models")
    packed = make_checkpoint(root / "b", seed=2, quantize=lambda module: (4, 32), **SHAPES)
    return [make_checkpoint(root / "a", seed=1), packed]


@pytest.fixture(scope="module")
def alone(folders) -> list[list[list[int]]]:
    """The answers of each model to each prompt."""
    answers = []
    for folder in folders:
        with Engine.load(folder, **SIZES) as engine:
            answers.append([engine.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS])
    assert answers[0] != answers[1]
    return answers


@pytest.fixture
def others() -> int:
    """Size in bytes of the memory that engines of other tests still use."""
    gc.collect()
    return mx.get_active_memory()


@pytest.fixture
def engine(folders):
    with Engine.load(folders[0], **SIZES) as engine:
        yield engine


def answers(engine: Engine) -> list[list[int]]:
    results = engine.generate(PROMPTS, GREEDY)
    check(engine)
    return [result.tokens for result in results]


# --- release ------------------------------------------------------------------------------------


def test_unloaded_engine_reloads_on_request(engine, alone):
    """Unloading frees the weights and the slab, and the next request loads them again."""
    assert answers(engine) == alone[0]
    gc.collect()
    held = mx.get_active_memory()
    ours = nbytes_of(engine.model) + slab_of(engine.model, Sizes(**SIZES, budget=0))
    engine.release()
    assert engine.lifecycle.is_unloaded and engine.model.config.layers == 2
    released = mx.get_active_memory()
    assert held - released >= ours > 300_000
    assert engine.step() is False and engine.lifecycle.is_unloaded  # no work, so no loading
    engine.release()  # a second call changes nothing
    assert answers(engine) == alone[0]
    assert not engine.lifecycle.is_unloaded
    assert mx.get_active_memory() - released == pytest.approx(ours, rel=0.1)


def test_a_request_that_is_open_keeps_the_weights(engine, folders, alone):
    handle = engine.submit(PROMPTS[0], GREEDY)
    engine.step()
    for change in (engine.release, engine.reload, lambda: engine.reload(folders[1])):
        with pytest.raises(RuntimeError, match="open requests: 1; wait for them"):
            change()
    assert handle.result().tokens == alone[0][0]
    engine.release()


def test_handle_outlives_the_weights(engine, folders):
    """A finished handle stays readable after the model is unloaded."""
    handle = engine.submit("Once", SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True))
    before = handle.result()
    engine.release()
    assert handle.result() == before and "".join(handle) == before.text
    engine.reload(folders[1])
    assert handle.result() == before and len(before.logprobs) == 5


def test_unloading_loses_no_step(engine):
    """Unloading commits the step in flight, even if it contains nothing but a ghost."""
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=4))
    for _ in range(3):
        engine.step()
    engine.snapshot().requests  # noqa: B018
    engine.cancel(next(iter(engine.registry.open.values())))
    seen = engine.snapshot()
    engine.release()
    engine.generate([PROMPTS[1]], GREEDY)
    steps = [step.step for step in engine.snapshot(seen).steps]
    assert steps == list(range(steps[0], engine.sched.steps + 1)) and engine.snapshot().missed == 0


def test_only_reloadable_models_are_unloaded(folders, engine):
    """A model that was not loaded from files cannot be reloaded."""
    with (
        Engine(engine.model, engine.text, **SIZES) as given,
        pytest.raises(RuntimeError, match="was not loaded from files"),
    ):
        given.release()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.release()
    with pytest.raises(RuntimeError, match="closed"):
        engine.reload()


def test_failed_reload_ends_the_requests(tmp_path, alone):
    """A failed reload ends the waiting requests. Later ones are served as soon as the weights are back."""
    folder = make_checkpoint(tmp_path / "model", seed=1)
    file = folder / "model.safetensors"
    with Engine.load(folder, **SIZES) as engine:
        engine.release()
        file.rename(tmp_path / "elsewhere")
        result = engine.generate([PROMPTS[0]], GREEDY)[0]
        assert result.finish_reason == "error" and "holds no weights" in result.error
        assert engine.lifecycle.is_unloaded and not engine.step() and not engine.snapshot().requests
        (tmp_path / "elsewhere").rename(file)
        assert answers(engine) == alone[0]


def test_changed_weights_are_not_served(tmp_path, alone):
    """Regression: changed weights of the same shape were served without an error. They are detected by the
    sizes and modification times of the files."""
    folder = make_checkpoint(tmp_path / "model", seed=1)
    with Engine.load(folder, **SIZES) as engine:
        assert answers(engine) == alone[0]
        engine.release()
        make_checkpoint(folder, seed=2)
        result = engine.generate([PROMPTS[0]], GREEDY)[0]
        assert "has changed since the model was loaded; restart" in result.error
        assert engine.lifecycle.is_unloaded
        engine.reload()  # explicitly load the changed files
        assert answers(engine) != alone[0]
        engine.release()
        answers(engine)


@pytest.mark.parametrize("kind", ["list", "open"])
def test_slow_folder_of_a_model_holds_no_lock(engine, folders, alone, kind):
    """Regression: while the files of an unloaded model were listed and opened, no other engine of the
    program could step."""
    engine.release()
    with (
        Engine.load(folders[1], **SIZES) as another,
        slow_folder(folders[0], kind) as slow,
        engine.serving(),
    ):
        first = engine.submit(PROMPTS[0], GREEDY)
        assert slow.is_asked.wait(60)
        second = engine.submit(PROMPTS[1], GREEDY)
        assert engine.snapshot().waiting == 2
        second.cancel()
        assert second.result(5).finish_reason == "cancelled"
        with another.serving():
            assert another.submit(PROMPTS[0], GREEDY).result(5).tokens == alone[1][0]
        assert first.finish_reason is None
        slow.answer()
        assert first.result(60).tokens == alone[0][0]


def test_reload_that_fails_while_it_unloads_refuses_nobody(engine, folders, alone, monkeypatch):
    """Regression: after a failed reload the flag that marks a running one was not reset, so requests were
    refused."""
    with monkeypatch.context() as patched:
        patched.setattr(device, "give_back", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.reload(folders[1])
    assert answers(engine) == alone[0]


def test_prompt_of_another_tokenizer_is_refused(engine, folders):
    """A prompt that was encoded before the model was exchanged contains token ids of the old model."""
    prompt = engine.text.encode_prompt("Once upon a time")
    engine.reload(folders[1])
    with pytest.raises(
        ValueError, match=r"was tokenized for .*, and this engine serves .*; tokenize it"
    ):
        engine.submit(prompt)


def test_ranks_keep_their_weights(engine, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(engine, "ranks", SimpleNamespace(size=2))
        for change in (engine.release, engine.reload):
            with pytest.raises(RuntimeError, match="several ranks share this model"):
                change()
    assert not engine.lifecycle.is_unloaded


# --- another model ------------------------------------------------------------------------------


def test_exchange_for_another_model(engine, folders, alone):
    """The other model has a different number of layers, and the number and the length of the slots change."""
    engine.generate(PROMPTS[:1], GREEDY)
    before = engine.snapshot()
    engine.reload(folders[1], slots=3)
    assert answers(engine) == alone[1]
    now = engine.snapshot(before)
    assert (now.limits.slots, now.limits.max_len, len(now.slots)) == (3, 128, 3)
    assert now.model.layers == 3 and now.missed == 0 and "4 bits" in engine.summary
    assert now.submitted == len(PROMPTS) + 1
    engine.reload(slots=1, max_len=64)
    assert answers(engine) == alone[1] and engine.sched.slots == 1
    engine.reload()
    assert engine.sched.slots == 1 and engine.sched.max_len == 64
    engine.reload(folders[0], slots=2)
    assert answers(engine) == alone[0]


@pytest.mark.parametrize("harm", ["no folder", "no tensor", "too large", "a word"])
def test_exchange_refuses_a_broken_model(harm, engine, tmp_path, alone):
    """A broken model, or a wrong size, is refused before the current model is unloaded."""
    runner = engine.runner
    options = {}
    folder = make_checkpoint(tmp_path / "wrong", seed=3)
    if harm == "no folder":
        folder = tmp_path / "nowhere"
    elif harm == "no tensor":
        make_checkpoint(tmp_path / "other", seed=3, num_hidden_layers=1)
        (tmp_path / "other" / "model.safetensors").replace(folder / "model.safetensors")
    elif harm == "too large":
        options = {"slots": 2**20, "max_len": 2**20}
    else:
        options = {"slot": 3}
    with pytest.raises((ModelError, ValueError)) as refusal:
        engine.reload(folder, **options)
    assert "\n" not in str(refusal.value)
    assert engine.runner is runner and answers(engine) == alone[0]


def test_failed_exchange_restores_the_model(engine, tmp_path, alone):
    """Weights are checked for NaN while they are loaded, when the current model is already unloaded. If the
    check fails, the current model is loaded again."""
    folder = make_checkpoint(tmp_path / "rotten", seed=3)
    file = folder / "model.safetensors"
    arrays = dict(mx.load(str(file)))
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * math.nan
    mx.save_safetensors(str(file), arrays)
    with pytest.raises(ModelError, match=r"norm\.weight holds NaN"):
        engine.reload(folder)
    assert answers(engine) == alone[0]
    engine.reload()
    assert answers(engine) == alone[0]


def test_prompt_of_another_model_is_refused(engine, folders):
    """Token ids are checked against the vocabulary, because MLX does not check bounds: an id beyond the
    embedding would read other memory."""
    prompt = engine.text.encode_prompt([5, 250])
    engine.text.vocabulary = 200
    with pytest.raises(ValueError, match="250 is outside the vocabulary"):
        engine.submit(prompt, GREEDY)


class Askers:
    """Threads that submit requests with short random pauses, and compare each answer with that of the model
    that was loaded at submit."""

    def __init__(self, engine: Engine, alone: list[list[list[int]]]):
        self.engine = engine
        self.alone = alone
        self.counts = [0, 0]  # number of answers per model
        self.wrong: list[str] = []
        self.gate = threading.Event()  # while it is not set, no thread submits
        self.over = False
        self.threads = [threading.Thread(target=self.ask, args=[seed]) for seed in range(3)]
        self.gate.set()
        for thread in self.threads:
            thread.start()

    def ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self.over:
            self.gate.wait()
            time.sleep(rng.choice([0, 0.001, 0.01]))
            n = int(rng.integers(len(PROMPTS)))
            try:
                handle = self.engine.submit(PROMPTS[n], GREEDY)
            except RuntimeError as error:
                if "another model" not in str(error):
                    self.wrong.append(str(error))
                continue
            which = int("4 bits" in self.engine.summary)  # an open request keeps its model loaded
            if handle.result(timeout=120).tokens != self.alone[which][n]:
                self.wrong.append(f"{n}: {handle.tokens} of model {which}, {handle.error}")
            self.counts[which] += 1

    def end(self) -> None:
        self.over = True
        self.gate.set()
        for thread in self.threads:
            thread.join()


def test_exchange_under_load(others, folders, alone):
    """Release the model or exchange it for the other under load. Each attempt is refused while a request is
    open, and repeated until none is. NANOBATCH_EXCHANGES=200 runs the long form."""
    rng = np.random.default_rng(7)
    releases = rng.random(EXCHANGES) < 0.4
    assert EXCHANGES - releases.sum() > 2
    with Engine.load(folders[0], **SIZES) as engine, engine.serving():
        askers = Askers(engine, alone)
        refused = 0
        which = 0
        done = 0
        while done < EXCHANGES and not askers.wrong:
            before = sum(askers.counts)
            if rng.random() < 0.7:
                askers.gate.clear()
            try:
                if releases[done]:
                    engine.release()
                else:
                    engine.reload(folders[1 - which], slots=int(rng.integers(1, 5)), max_len=128)
                    which = 1 - which
                done += 1
                askers.gate.set()
                while sum(askers.counts) == before and not askers.wrong:
                    time.sleep(0.001)
            except RuntimeError as error:
                assert "open" in str(error), error
                refused += 1
                time.sleep(0.001)
        askers.end()
        engine.release()
        left = mx.get_active_memory()
        check(engine)
    print(
        f"{done} exchanges, {refused} refused; answers: {askers.counts}; {left:,} bytes at the end"
    )
    assert not askers.wrong and done == EXCHANGES and refused > 0 and min(askers.counts) > 0
    assert left - others < 300_000  # less than the size of either model


# --- idle ---------------------------------------------------------------------------------------


def test_idle_engine_is_unloaded(engine):
    """The engine is unloaded when no request has arrived for the given time."""
    clock = Clock()
    said: list[str] = []
    idle = Idle(engine, 10, said.append, clock)
    assert idle() == 10
    clock.now += 4
    assert idle() == 6
    handle = engine.submit(PROMPTS[0], GREEDY)
    clock.now += 100
    assert idle() is None  # a request is open
    handle.result()
    engine.step(plan=False)
    assert idle() == 10
    engine.submit(PROMPTS[0], GREEDY).result()  # between two calls of idle()
    clock.now += 9
    assert idle() == 10
    clock.now += 10
    assert idle() is None and engine.lifecycle.is_unloaded
    assert said == ["idle for 10 s: weights and slab are unloaded until the next request"]
    assert idle() is None and len(said) == 1
    engine.submit(PROMPTS[0], GREEDY).result()
    engine.step(plan=False)
    assert idle() == 10 and said[1:] == ["the weights are loaded again"]


def test_request_during_an_unload(engine, alone):
    """A request that arrives after the queue was checked and before the lock is taken keeps the model loaded."""
    clock = Clock()
    said: list[str] = []
    idle = Idle(engine, 10, said.append, clock)
    release = engine.release
    handles = []

    def late() -> None:
        handles.append(engine.submit(PROMPTS[0], GREEDY))
        release()

    engine.release = late
    clock.now += 11
    assert idle() is None and not said and not engine.lifecycle.is_unloaded
    assert handles[0].result().tokens == alone[0][0]
