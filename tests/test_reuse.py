"""Prompts that begin alike share what has been computed, and nobody can tell but by the time it takes."""

import numpy as np
import pytest
from checkpoints import make_checkpoint

from nanobatch import Engine, Sampling
from parts.device import mx

SHORT = Sampling(max_tokens=4, ignore_eos=True)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def prefilled(engine: Engine) -> int:
    """How many prompt tokens the engine has computed, in the steps that it remembers."""
    return sum(stop - start for step in engine.snapshot().steps for *_, start, stop in step.prefill)


@pytest.mark.parametrize("slots", [8, 3])
def test_eight_requests_sharing_a_system_prompt_of_500_tokens_compute_it_once(parts, slots):
    """15 times 32 of the 500 tokens can be shared. The first request computes them, the others take them over."""
    system = tokens(500)
    prompts = [system + tokens(20, seed=n) for n in range(1, 9)]
    with Engine(*parts, slots=slots, max_len=640, chunk=32) as engine:
        results = engine.generate(prompts, SHORT)
        assert [r.metrics.cached_tokens for r in results] == [0] + [480] * 7
        assert prefilled(engine) == 520 + 7 * 40
    with Engine(*parts, slots=slots, max_len=640, chunk=32, reuse=False) as plain:
        expected = plain.generate(prompts, SHORT)
        assert prefilled(plain) == 8 * 520
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert all(r.metrics.cached_tokens == 0 for r in expected)


def test_a_conversation_that_goes_on_continues_in_its_own_slot(parts):
    with Engine(*parts, slots=3, max_len=256, chunk=32) as engine:
        history = tokens(100)
        first = engine.submit(history, SHORT)
        answer = first.result().tokens
        again = engine.submit(history + answer + tokens(10, seed=1), SHORT)
        assert again.result().metrics.cached_tokens == 96
        assert again.request.slot == first.request.slot


def test_the_longest_match_wins_live_or_free(parts):
    """The free slot 0 remembers 64 tokens of it, the live slot 1 has 128."""
    long = tokens(140)
    with Engine(*parts, slots=3, max_len=256, chunk=32) as engine:
        engine.submit(long[:70], SHORT).result()
        other = engine.submit(tokens(40, seed=9), Sampling(max_tokens=200, ignore_eos=True))
        live = engine.submit(long, Sampling(max_tokens=100, ignore_eos=True))
        while not live.tokens:
            engine.step()
        assert engine.submit([*long[:135], 1, 2, 3], SHORT).result().metrics.cached_tokens == 128
        other.cancel(), live.cancel()


def test_a_whole_prompt_is_never_taken_over_because_its_last_token_must_be_computed(parts):
    with Engine(*parts, slots=2, max_len=256, chunk=32) as engine:
        first, second = (engine.submit(tokens(64), SHORT).result() for _ in range(2))
        assert second.metrics.cached_tokens == 32 and second.tokens == first.tokens


def test_the_memory_that_was_not_used_for_longest_goes_first(parts):
    a, b, c = (tokens(40, seed=n) for n in range(3))
    with Engine(*parts, slots=2, max_len=128, chunk=32) as engine:
        for prompt in (a, b, a):
            engine.submit(prompt, SHORT).result()
        engine.submit(c, SHORT).result()  # takes the slot of b
        assert engine.submit(a, SHORT).result().metrics.cached_tokens == 32
        assert engine.submit(b, SHORT).result().metrics.cached_tokens == 0


def test_dynamic_rope_beyond_the_trained_length_shares_nothing(tmp_path):
    """There a prompt's length turns all of its keys, so the same beginning has other rows in a longer prompt."""
    folder = make_checkpoint(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=100)
    with Engine.load(folder, slots=2, max_len=256, chunk=32) as engine:
        opening = tokens(90)
        results = engine.generate([opening, [*opening[:80], 1], opening + tokens(50, seed=1)], SHORT)
        assert [r.metrics.cached_tokens for r in results] == [0, 64, 0]
        longer = engine.submit(opening + tokens(60, seed=2), SHORT).result()
        assert longer.metrics.cached_tokens == 0


def test_copying_a_prefix_copies_no_more_than_the_prefix(parts):
    opening = tokens(64)
    with Engine(*parts, slots=4, max_len=16_384, chunk=32) as engine:
        layer = engine.runner.slab.k[0].nbytes
        before = mx.get_active_memory()
        for seed in range(6):
            handles = [engine.submit(opening + tokens(8, seed=seed + n), SHORT) for n in range(4)]
            while any(handle.finish_reason is None for handle in handles):
                mx.reset_peak_memory()
                engine.step()
                assert mx.get_peak_memory() - before < layer
        assert sum(handle.metrics.cached_tokens for handle in handles) == 4 * 64


def test_a_snapshot_shows_what_was_reused_and_what_is_remembered(parts):
    with Engine(*parts, slots=2, max_len=128, chunk=32) as engine:
        engine.submit(tokens(40), SHORT).result()
        assert [slot.remembered for slot in engine.snapshot().slots] == [40, 0]
        engine.submit(tokens(40), SHORT)
        engine.step()
        assert engine.snapshot().slots[0].reused == 32
