"""Progress, speed and remaining time of a long prompt."""

import pytest
from harness import exactly
from word_engine import Clock, word_engine

from engine.prefill_progress import PrefillClock, PrefillProgress
from nanobatch import Engine

SHORT = exactly(3)


def test_estimate_counts_down_within_a_chunk():
    clock = PrefillClock()
    clock.record_chunk(0, 50, 0.0, 10.0)
    assert clock.progress(100, 0, 0.0, 14.0).left_s is None
    clock.left_s = 10.0
    assert clock.progress(100, 0, 0.0, 14.0).left_s == pytest.approx(6.0)
    assert clock.progress(100, 0, 0.0, 99.0).left_s == 0.0


def test_slow_first_chunk_is_shown():
    told = PrefillClock().progress(100, 0, 5.0, 8.0)
    assert told.is_long and told.words == "0 of 100 tokens"
    assert not PrefillClock().progress(100, 0, 5.0, 6.0).is_long


def test_restarted_prompt_is_measured_again():
    """A failed step discards a prompt's rows, so its speed is measured from the beginning again."""
    clock = PrefillClock()
    clock.record_chunk(0, 50, 0.0, 1.0)
    clock.record_chunk(0, 10, 100.0, 101.0)
    assert clock.progress(100, 0, 100.0, 101.0) == PrefillProgress(10, 100, 0, 1.0, 10.0)


def test_words_say_no_more_than_is_known():
    assert PrefillProgress(1, 2).words == "1 of 2 tokens"
    assert PrefillProgress(1, 2, tokens_per_s=3.0).words == "1 of 2 tokens, 3.0 tokens/s"
    words = "1 of 2 tokens, 3.0 tokens/s, about 1 s"
    assert PrefillProgress(1, 2, tokens_per_s=3.0, left_s=0.3).words == words


@pytest.mark.parametrize(
    "left, words",
    [
        (0.0, "1 s"),
        (7.4, "8 s"),
        (38.0, "40 s"),
        (88.0, "90 s"),
        (91.0, "2 min"),
        (360.0, "6 min"),
        (5_400.0, "1.5 h"),
        (None, ""),
    ],
)
def test_time_left_is_rounded(left, words):
    assert PrefillProgress(1, 2, left_s=left).left == words


def test_snapshot_has_prefill_progress():
    """A chunk of 16 tokens takes 5 ms, and decoding in the same step another 10."""
    clock = Clock()
    with word_engine(clock, clock, slots=2, max_len=70_000) as engine:
        long = engine.submit([1] * 9_600, SHORT)
        engine.submit([2] * 10, SHORT)
        for _ in range(120):
            engine.step()
        look = engine.snapshot()
        told = look.slots[long.request.slot].prefill
        assert told == long.prefill and told.is_long and told.cached == 0
        assert 0 < told.done < told.total == 9_600
        read = sum(step.prompt_tokens for step in look.steps)
        assert look.prompt_tokens == read == told.done + 10
        assert look.prompt_tokens_per_s == told.tokens_per_s > 1_000
        assert long.result().finish_reason == "length"
        done = engine.snapshot()
        assert done.prompt_tokens == 9_610 and done.prompt_tokens_per_s == 0.0


def test_a_second_turn_reads_only_what_is_new(engine: Engine):
    prompt = [1 + n % 5 for n in range(80)]
    engine.submit(prompt, SHORT).result()
    before = engine.snapshot()
    handle = engine.submit([*prompt, 7, 8], SHORT)
    handle.result()
    told = handle.prefill
    assert told.cached > 0 and told.done == told.total == 82
    assert engine.snapshot(before).prompt_tokens - before.prompt_tokens == 82 - told.cached
