"""How far a long prompt is, how fast it is read, and how long it will take."""

import pytest
from harness import exactly
from word_engine import Clock, word_engine

from engine.prefill_progress import PrefillClock, PrefillProgress, work_of
from nanobatch import Engine

SHORT = exactly(3)


def test_estimate_grows_with_depth():
    """A prompt of 18,813 tokens whose tokens cost twice as much from row 3,500 on: from the mean
    rate so far, the estimate in its middle was half of what the rest then took."""
    total, far, speed = 18_813, 3_500, 1_000
    clock = PrefillClock()
    for start in range(0, total, 64):
        stop = min(start + 64, total)
        clock.record_chunk(start, stop, work_of(start, far) / speed, work_of(stop, far) / speed)
        told = clock.progress(total, 0, far, 0.0, work_of(stop, far) / speed)
        left = (work_of(total, far) - work_of(stop, far)) / speed
        assert told.left_s == pytest.approx(left) and told.done == stop
        if start == 9_408:
            naive = told.seconds * (total - stop) / stop
            assert naive < 0.5 * left
    assert told.done == told.total and not told.is_long


def test_estimate_counts_down_within_a_chunk():
    clock = PrefillClock()
    clock.record_chunk(0, 50, 0.0, 10.0)
    assert clock.progress(100, 0, 2**63, 0.0, 14.0).left_s == pytest.approx(6.0)
    assert clock.progress(100, 0, 2**63, 0.0, 99.0).left_s == 0.0


def test_slow_first_chunk_is_shown():
    told = PrefillClock().progress(100, 0, 2**63, 5.0, 8.0)
    assert told.is_long and told.words == "0 of 100 tokens"
    assert not PrefillClock().progress(100, 0, 2**63, 5.0, 6.0).is_long


def test_restarted_prompt_is_measured_again():
    """After a failed step the rows are gone."""
    clock = PrefillClock()
    clock.record_chunk(0, 50, 0.0, 1.0)
    clock.record_chunk(0, 10, 100.0, 101.0)
    assert clock.progress(100, 0, 2**63, 100.0, 101.0) == PrefillProgress(
        10, 100, 0, 1.0, 10.0, 9.0
    )


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
    """A chunk takes 5 ms, so 1,000 chunks of 64 tokens take 5 s."""
    clock = Clock()
    with word_engine(clock, clock, slots=2, max_len=70_000) as engine:
        long = engine.submit([1] * 64_000, SHORT)
        engine.submit([2] * 10, SHORT)
        for _ in range(20):
            engine.step()
        look = engine.snapshot()
        told = look.slots[long.request.slot].prefill
        assert told == long.prefill and told.is_long and told.cached == 0
        assert 0 < told.done < told.total == 64_000
        read = sum(step.prompt_tokens for step in look.steps)
        assert look.prompt_tokens == read == told.done + 10
        assert look.prompt_tokens_per_s == told.tokens_per_s > 1_000
        assert long.result().finish_reason == "length"
        done = engine.snapshot()
        assert done.prompt_tokens == 64_010 and done.prompt_tokens_per_s == 0.0


def test_a_second_turn_reads_only_what_is_new(engine: Engine):
    prompt = [1 + n % 5 for n in range(80)]
    engine.submit(prompt, SHORT).result()
    before = engine.snapshot()
    handle = engine.submit([*prompt, 7, 8], SHORT)
    handle.result()
    told = handle.prefill
    assert told.cached > 0 and told.done == told.total == 82
    assert engine.snapshot(before).prompt_tokens - before.prompt_tokens == 82 - told.cached
