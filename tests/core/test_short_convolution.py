"""LFM2's short convolutions: their inputs are rows of the slab, so answers continue from any row."""

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import Tap
from parity import LFM2

from models.config import Config
from models.load import read_model
from models.memory import rows_of_layers, slab_nbytes, slab_shape
from models.sharding import Shard
from nanobatch import Engine, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    kinds = ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]
    changes = LFM2 | {"num_hidden_layers": 6, "layer_types": kinds}
    return make_checkpoint(tmp_path_factory.mktemp("lfm2"), seed=5, model_type="lfm2", **changes)


def answer(engine: Engine, prompt: list[int], tokens: int = 6) -> tuple:
    """Return a request's tokens and logits, and the length and source of its cached prefix."""
    tap = Tap(engine)
    handle = engine.submit(prompt, SamplingParams(max_tokens=tokens))
    result = handle.result()
    return (
        result.tokens,
        tap.of(handle),
        handle.request.prefix.cached,
        handle.request.prefix.cached_from,
    )


def alone(folder, prompt: list[int]) -> tuple:
    with Engine.load(folder, slots=1, max_len=256, chunk=32, prefix_cache=False) as engine:
        return answer(engine, prompt)


def prompts(common: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(common)
    first = rng.integers(1, 250, 40).tolist()
    second = [*first[:common], 255 - first[common], *rng.integers(1, 250, 9).tolist()]
    return first, second


@pytest.mark.parametrize(
    ("slots", "common"), [*((1, n) for n in (16, 17, 18, 19)), *((2, n) for n in (32, 33, 34, 35))]
)
def test_an_answer_continues_from_any_row(folder, common, slots):
    """The cached rows are in the same slot or copied to another one. The first new tokens are convolved with
    the last cached rows."""
    first, second = prompts(common)
    tokens, logits, _, _ = alone(folder, second)
    with Engine.load(folder, slots=slots, max_len=256, chunk=32) as engine:
        answer(engine, first)
        found = answer(engine, second)
    assert found[0] == tokens and np.array_equal(found[1], logits)
    assert found[2] == common


def test_rows_on_disk_are_restored(folder, tmp_path):
    first, _ = (np.random.default_rng(9).integers(1, 250, 150).tolist(), 0)
    tokens, logits, _, _ = alone(folder, [*first, 7])
    for wanted in ("", "disk"):
        with Engine.load(
            folder, slots=1, max_len=256, chunk=32, slot_cache=f"{tmp_path / 'cache'}:1GB"
        ) as engine:
            found = answer(engine, [*first, 7] if wanted else first)
    assert found[2:] == (len(first), "disk")
    assert found[0] == tokens and np.array_equal(found[1], logits)


def test_memory_of_a_row(folder):
    """The 350M model takes 32 KiB per token: 1,024 numbers of 16 bits in each of 16 layers."""
    c = read_model(folder).config
    published = c.__class__(
        **{**vars(c), "D": 1024, "H": 16, "Hkv": 8, "Dh": 64, "layers": 16}
        | {"convolved": frozenset(range(16)) - {2, 5, 8, 10, 12, 14}}
    )
    assert isinstance(published, Config)
    assert sum(heads * Dh for heads, Dh in rows_of_layers(published)) * 2 == 32 * 1024
    whole = slab_nbytes(*slab_shape(published, 4, 1024, 128), 2)
    assert whole >= 4 * 1024 * 32 * 1024


def test_ranks_are_refused(folder):
    with pytest.raises(ValueError, match=r"it has convolutions\. Start one process"):
        Shard.for_rank(read_model(folder).config, 0, 2)
