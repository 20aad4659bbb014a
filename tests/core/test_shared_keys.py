"""Gemma 4's last layers reuse the keys and values of earlier layers, so the slab has no rows for them."""

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import Tap
from parity import GEMMA4

from kernels.device import mx
from models.load import read_model
from models.memory import Sizes, rows_of_layers, slab_of
from models.sharding import Shard
from nanobatch import Engine, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("gemma4"), seed=5, model_type="gemma4_text", **GEMMA4
    )


def answer(engine: Engine, prompt: list[int]) -> tuple:
    tap = Tap(engine)
    handle = engine.submit(prompt, SamplingParams(max_tokens=6))
    return handle.result().tokens, tap.of(handle), handle.request.prefix.cached


@pytest.mark.parametrize(("slots", "common"), [(1, 33), (2, 40)])
def test_an_answer_continues_from_shared_rows(folder, slots, common, tmp_path):
    """The cached rows come from the same slot, from another one, or from disk."""
    rng = np.random.default_rng(common)
    first = rng.integers(1, 250, 90).tolist()
    second = [*first[:common], 255 - first[common], *rng.integers(1, 250, 9).tolist()]
    sizes = {"max_len": 256, "chunk": 32}
    with Engine.load(folder, slots=1, prefix_cache=False, **sizes) as engine:
        tokens, logits, _ = answer(engine, second)
    cache = {"slot_cache": f"{tmp_path / 'cache'}:1GB"}
    with Engine.load(folder, slots=slots, **sizes, **cache) as engine:
        answer(engine, first)
        found = [answer(engine, second)]
    with Engine.load(folder, slots=slots, **sizes, **cache) as engine:
        found.append(answer(engine, second))
    for its_tokens, its_logits, cached in found:
        assert its_tokens == tokens and np.array_equal(its_logits, logits)
        assert cached >= common


def test_memory_of_a_row(folder):
    """Gemma 4 E2B takes 18 KiB per token: 15 of 35 layers have rows, three of them with a head dimension of
    512."""
    model = read_model(folder)
    c = model.config
    full = frozenset(range(4, 35, 5))
    published = {"layers": 35, "Hkv": 1, "Dh": 256, "far": (1, 512), "reusing": 20, "whole": full}
    published = c.__class__(**vars(c) | published)
    assert sum(heads * Dh for heads, Dh in rows_of_layers(published)) * 2 == 18 * 1024
    assert {published.slab_index(i) for i in range(15, 35)} == {13, 14}
    with Engine.load(folder, slots=3, max_len=64, chunk=32) as engine:
        arrays = engine.runner.slab.arrays
        assert [array.shape[1::2] for array in arrays] == [(2, 16), (2, 16), (2, 24)]
        assert sum(array.nbytes for array in arrays) == slab_of(
            engine.model, Sizes(3, 64, 32, budget=32)
        )


def test_keys_that_no_layer_uses_are_skipped(folder, tmp_path):
    """Checkpoints contain key and value projections for all layers, also for those that reuse other layers'
    rows."""
    weights = mx.load(str(folder / "model.safetensors"))
    for module in ("k_proj", "v_proj"):
        weights[f"model.layers.5.self_attn.{module}.weight"] = mx.ones((24, 64))
    weights["model.layers.5.self_attn.k_norm.weight"] = mx.ones(24)
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    assert read_model(tmp_path).config == read_model(folder).config


def test_ranks_are_refused(folder):
    with pytest.raises(ValueError, match=r"different heads\. Start one process"):
        Shard.for_rank(read_model(folder).config, 0, 2)
