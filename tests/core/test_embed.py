"""Embeddings: a prompt without an answer, in the same steps as other requests' decoding."""

import json
from array import array
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint
from harness import check, exactly
from parity import CONFIGS
from planted_bugs import poisoned

from kernels.device import mx
from nanobatch import Engine, ModelError, SamplingParams
from step_output import unit_vector

EMBED = SamplingParams(embeds=True)
QWEN = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
# Several families, quantized or not. In tied Gemma and Granite the last norm's weights are scaled
SHAPES = ("qwen3", "gemma3_text", "granite, tied", "qwen3_moe, 4 bits")


def make_embedder(folder: Path, mode: str = "lasttoken", **changes) -> Path:
    make_checkpoint(folder, **{**QWEN, **changes})
    return write_pooling(folder, {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False})


def write_pooling(folder: Path, pooling: dict) -> Path:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder") / "model")


def texts(rng: np.random.Generator, count: int, longest: int = 150) -> list[list[int]]:
    """Return prompts, some with a common prefix."""
    opening = rng.integers(0, 256, longest).tolist()
    found = []
    for _ in range(count):
        ids = rng.integers(0, 256, int(rng.integers(1, longest))).tolist()
        if rng.random() < 0.5:
            ids = (opening[: int(rng.integers(1, longest))] + ids)[:longest]
        found.append(ids)
    return found


def hidden(reference: Reference, ids: list[int]) -> np.ndarray:
    """Return mlx-lm's hidden state of the last token after the final norm, scaled to length 1."""
    inner = reference.model.model
    state = np.array(inner(mx.array([ids]))[0, -1].astype(mx.float32), np.float64)
    return state / np.linalg.norm(state)


@pytest.mark.parametrize("name", SHAPES)
def test_a_vector_is_the_last_state_of_mlx_lm(name, tmp_path):
    options = {key: value for key, value in CONFIGS[name].items() if key != "reference"}
    folder = make_checkpoint(tmp_path, seed=5, **options)
    reference = Reference(folder)
    asked = texts(np.random.default_rng(5), 6)
    options = {"slots": 3, "max_len": 192, "chunk": 32, "embeds": True}
    with Engine.load(folder, activations=32, kv="float32", **options) as engine:
        vectors = engine.embed(asked)
    furthest = max(
        np.abs(np.array(vector) - hidden(reference, ids)).max()
        for vector, ids in zip(vectors, asked, strict=True)
    )
    print(f"{name}: {len(asked)} texts, the largest difference is {furthest:.2g}")
    assert furthest < 1e-5
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-6 for vector in vectors)
    assert len({vector.tobytes() for vector in vectors}) == len(asked)


def test_embedding_is_batch_invariant(folder):
    """A text's vector has the same bits next to decoding requests, with rows copied from other texts, in any
    slot, with any chunks, and with steps in flight."""
    rng = np.random.default_rng(11)
    asked = texts(rng, 9)
    wish = SamplingParams(max_tokens=20, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
    with Engine.load(folder, slots=1, max_len=192, chunk=128, prefix_cache=False) as engine:
        alone = [engine.embed([ids])[0].tobytes() for ids in asked]
        answer = engine.submit(asked[0], wish).result()
    reused = 0
    for run_ahead, speculate in ((True, 0), (False, 3)):
        with Engine.load(
            folder, slots=5, max_len=192, chunk=32, run_ahead=run_ahead, speculate=speculate
        ) as engine:
            assert engine.is_batch_invariant
            handles = []
            others = []
            for ids in (*asked, *asked[::-1]):  # the second time a slot may hold its rows
                handles.append(engine.submit(ids, EMBED))
                if rng.random() < 0.5:
                    others.append(engine.submit(asked[0], wish))
                for _ in range(int(rng.integers(0, 4))):
                    engine.step()
                    check(engine)
            results = [handle.result() for handle in handles]
            found = [(other.result().tokens, other.logprobs) for other in others]
            assert found == [(answer.tokens, answer.logprobs)] * len(others) and len(others) > 4
        reused += sum(result.metrics.cached_tokens for result in results)
        got = [unit_vector(result.vector).tobytes() for result in results]
        assert got == [*alone, *alone[::-1]]
    assert reused > 300


def test_the_row_of_a_vector_ends_with_its_prompt(folder):
    """An embedding request emits no token, and frees its slot as soon as its prompt is prefilled."""
    with Engine.load(folder, slots=2, max_len=192, chunk=32) as engine:
        handle = engine.submit(list(range(70)), EMBED)
        result = handle.result()
        seen = engine.snapshot()
    (view,) = seen.ended
    assert (view.reason, view.text, view.lengths, view.metrics.output_tokens) == ("stop", "", (), 0)
    chunks = [step.prefill[0] for step in seen.steps]
    assert len(chunks) > 1 and chunks[0][2] == 0 and chunks[-1][3] == 70
    assert not any(step.tokens or step.decode for step in seen.steps) and seen.output_tokens == 0
    assert seen.slots[0].phase == "free" and seen.slots[0].remembered == 70
    assert result.tokens == [] and result.text == "" and len(result.vector) == 64
    assert list(handle) == []


def test_the_slab_is_not_copied_for_vectors(folder, monkeypatch):
    """A hidden state keeps no reference to the slab, which would force the next write to copy it."""
    with Engine.load(folder, slots=4, max_len=1024, chunk=32) as engine:
        size = engine.runner.slab.arrays[0].nbytes
        engine.submit(list(range(40)), exactly(60))
        rng = np.random.default_rng(1)
        engine.step()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for ids in texts(rng, 20, longest=60):
            engine.submit(ids, EMBED)
            engine.step()
        assert engine.registry.steps.count > 15 and mx.get_peak_memory() - before < size


def test_non_finite_embedding_is_an_error(folder):
    """A vector with NaN ends its request with an error, because a client would take it for valid."""
    with Engine.load(folder, slots=1, max_len=64) as sound:
        parts = poisoned(sound.model, 9), sound.text
    with Engine(*parts, slots=2, max_len=64) as engine:
        bad = engine.submit([5, 9, 7], EMBED)
        good = engine.submit([5, 8, 7], EMBED)
        assert bad.result().finish_reason == "error" and bad.result().vector is None
        assert "not finite" in bad.result().error and len(good.result().vector) == 64
        with pytest.raises(RuntimeError, match="not finite"):
            engine.embed([[9]])


def test_dimensions_truncate_and_renormalise(folder):
    """As with OpenAI's `dimensions`, keep the first numbers and scale them to length 1."""
    with Engine.load(folder, slots=1, max_len=64) as engine:
        whole = np.array(engine.embed(["Once"])[0])
        part = np.array(engine.embed(["Once"], dimensions=10)[0])
        np.testing.assert_allclose(part, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-7)
        for wrong in (0, 65, 1.5, True):
            with pytest.raises(ValueError, match="dimensions"):
                engine.embed(["Once"], dimensions=wrong)
    assert unit_vector(array("f", [0, 0])) == array("f", [0, 0])


# --- embedding models and others ----------------------------------------------------------------


def test_chat_model_warns_about_embeddings(tmp_path):
    """A chat model's vectors look valid but are meaningless, so `embed` needs `embeds=True`."""
    folder = make_checkpoint(tmp_path, **QWEN)
    with Engine.load(folder, slots=1, max_len=64) as engine:
        with pytest.raises(ValueError, match=r"not made for embeddings: its folder has no 1_Pool"):
            engine.embed(["Once"])
        assert engine.generate(["Once"], SamplingParams(max_tokens=2))[0].tokens
    with Engine.load(folder, slots=1, max_len=64, embeds=True) as engine:
        assert len(engine.embed(["Once"])[0]) == 64


@pytest.mark.parametrize(
    ("pooling", "is_ours"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, True),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, True),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, False),
        ({}, False),
    ],
)
def test_only_last_token_pooling_is_served(pooling, is_ours, tmp_path):
    folder = write_pooling(make_checkpoint(tmp_path, **QWEN), pooling)
    with Engine.load(folder, slots=1, max_len=64) as engine:
        if is_ours:
            assert engine.embed(["Once"])
        else:
            with pytest.raises(ValueError, match="only lasttoken is served"):
                engine.embed(["Once"])


def test_headless_model_loads_as_published(tmp_path, folder):
    """The tensor names of Qwen3-Embedding lack "model.", and its larger models have no head, although their
    config does not tie it to the embedding."""
    headless = make_embedder(tmp_path / "b", tie_word_embeddings=False)
    arrays = mx.load(str(folder / "model.safetensors"))  # tied, so there is no head
    bare = {name.removeprefix("model."): array for name, array in arrays.items()}
    mx.save_safetensors(str(headless / "model.safetensors"), bare)
    with Engine.load(folder, slots=1, max_len=64) as engine:
        wanted = engine.embed(["Once upon"])
    with Engine.load(headless, slots=1, max_len=64) as engine:
        assert engine.embed(["Once upon"]) == wanted  # the same weights except for the head
        with pytest.raises(ValueError, match="has no head, so it cannot generate"):
            engine.submit("Once")
    (headless / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"lacks the tensor lm_head\.weight"):
        Engine.load(headless, slots=1, max_len=64)
