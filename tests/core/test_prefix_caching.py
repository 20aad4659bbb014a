"""Prompts with a common prefix share its rows, which saves time and changes nothing else."""

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import Tap, check, exactly
from long_forms import number_of
from planted_bugs import poisoned

from kernels.device import mx
from nanobatch import Engine, SamplingParams

CONVERSATIONS = number_of("CONVERSATIONS", 4)  # number of random schedules
SHORT = exactly(4)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def prefilled(engine: Engine) -> int:
    """Return the number of prompt tokens computed in the recorded steps."""
    return sum(stop - start for step in engine.snapshot().steps for *_, start, stop in step.prefill)


@pytest.mark.parametrize("slots", [8, 3])
def test_shared_system_prompt_is_computed_once(parts, slots):
    """The first request computes the 500 tokens. The second reuses 480 of them: it does not wait for the last
    20, which are fewer than a chunk. The other six reuse all 500."""
    system = tokens(500)
    prompts = [system + tokens(20, seed=n) for n in range(1, 9)]
    with Engine(*parts, slots=slots, max_len=640, chunk=32, budget=slots + 32) as engine:
        results = engine.generate(prompts, SHORT)
        assert [r.metrics.cached_tokens for r in results] == [0, 480] + [500] * 6
        assert prefilled(engine) == 8 * 520 - sum(r.metrics.cached_tokens for r in results)
    with Engine(*parts, slots=slots, max_len=640, chunk=32, prefix_cache=False) as plain:
        expected = plain.generate(prompts, SHORT)
        assert prefilled(plain) == 8 * 520
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert all(r.metrics.cached_tokens == 0 for r in expected)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_stretched_positions_share_rows(kind, tmp_path):
    """The rotation of a position depends on the slot length and not on the prompt's length, so equal prefixes
    have equal rows."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]}
    scaling = {"rope_type": kind, "factor": 2.0, **(factors if kind == "longrope" else {})}
    folder = make_checkpoint(
        tmp_path,
        rope_scaling=scaling,
        max_position_embeddings=100,
        original_max_position_embeddings=100,
    )
    opening = tokens(96)
    prompts = [
        opening,
        [*opening[:80], 1],
        opening + tokens(50, seed=1),
        opening + tokens(60, seed=2),
    ]
    with Engine.load(folder, slots=1, max_len=256, chunk=32, prefix_cache=False) as engine:
        alone = [result.tokens for result in engine.generate(prompts, SHORT)]
    with Engine.load(folder, slots=4, max_len=256, chunk=32) as engine:
        results = [engine.submit(prompt, SHORT).result() for prompt in prompts]
    assert [r.metrics.cached_tokens for r in results] == [0, 80, 96, 96]
    assert [r.tokens for r in results] == alone


def test_prefix_copy_moves_only_the_prefix(make_engine):
    """Only the rows of the prefix are copied, because copying a slot takes longer than computing a short prefix."""
    opening = tokens(64)
    engine = make_engine(slots=4, max_len=16384, budget=36)
    layer = engine.runner.slab.arrays[0].nbytes
    before = mx.get_active_memory()
    for seed in range(6):
        handles = [engine.submit(opening + tokens(8, seed=seed + n), SHORT) for n in range(4)]
        while any(handle.finish_reason is None for handle in handles):
            mx.reset_peak_memory()
            engine.step()
            assert mx.get_peak_memory() - before < layer
    # Three requests reuse all but their last token
    assert sum(handle.metrics.cached_tokens for handle in handles) == 64 + 3 * 71


# --- a chat's next turn -------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [35, 69, 70])
@pytest.mark.parametrize("copied", [False, True])
def test_cached_rows_change_no_bit(parts, copied, kept):
    """The rows come from the request's own slot, or are copied from a slot where another request runs. The
    prompt has 40 tokens, and the answer 30."""
    longer = exactly(30)
    with (
        Engine(*parts, slots=1 + copied, max_len=256, chunk=32) as engine,
        Engine(*parts, slots=2, max_len=256) as plain,
    ):
        taps = Tap(engine), Tap(plain)
        first = engine.submit(tokens(40), longer)
        said = tokens(40) + first.result().tokens
        prompt = [*said[:kept], 271, *tokens(5, seed=3)]
        assert 271 not in said
        if copied:
            live = engine.submit(said + tokens(2, seed=4), longer)
            engine.step()
            assert live.request.slot == first.request.slot
        turn = engine.submit(prompt, SHORT)
        new = plain.submit(prompt, SHORT)
        cached = turn.result().metrics.cached_tokens, new.result().metrics.cached_tokens
        assert cached == (min(kept, 70 if copied else 69), 0)
        assert (turn.request.slot != first.request.slot) == copied
        assert np.array_equal(taps[0].of(turn), taps[1].of(new))


@pytest.mark.parametrize("run_ahead", [True, False])
def test_cancel_keeps_the_cache_and_error_drops_it(parts, run_ahead):
    """A cancelled request's rows are reused. A failed request's rows are not, because they may not be finite."""
    model, text = parts
    prompt = [n % 90 for n in range(40)]
    with Engine(
        poisoned(model, 99), text, slots=1, max_len=256, chunk=32, run_ahead=run_ahead
    ) as engine:
        cancelled = engine.submit(prompt, exactly(50, logit_bias={99: -1e9}))
        while len(cancelled.tokens) < 10:
            engine.step()
        cancelled.cancel()
        said = [*prompt, *cancelled.tokens]
        assert engine.submit([*said, 7], SHORT).result().metrics.cached_tokens == len(said) - 1
        failed = engine.submit([*said, 7, 99], SHORT)
        assert failed.result().finish_reason == "error"
        assert [slot.remembered for slot in engine.snapshot().slots] == [0]
        again = engine.submit([*said, 7], exactly(100, logit_bias={99: -1e9})).result()
        assert again.metrics.cached_tokens == 0 and again.finish_reason == "length"


@pytest.fixture(scope="module")
def plain(parts):
    with Engine(*parts, slots=16, max_len=320, prefix_cache=False) as engine:
        yield engine


def conversations(
    parts, plain: Engine, seed: int, most_slots: int = 6, **more
) -> tuple[int, int, int, int]:
    """Run three turns of random conversations concurrently.

    Return the number of tokens, of answers that differ from those without reuse, of reused answer rows, and
    of rows restored from disk.
    """
    rng = np.random.default_rng(seed)
    slots, chunk, budget = (
        int(rng.integers(1, most_slots + 1)),
        int(rng.choice([32, 64])),
        int(rng.choice([1, 100, 10_000])),
    )
    options = {
        "slots": slots,
        "chunk": chunk,
        "budget": budget,
        "run_ahead": bool(rng.random() < 0.8),
        **more,
    }
    opening, done, reused = tokens(70, seed=seed), [], 0
    with Engine(*parts, max_len=320, **options) as engine:
        # (handle, step in which it is cancelled, turn, length of the previous prompt)
        going = []

        def say(prompt: list[int], turn: int, before: int) -> None:
            sampling = exactly(int(rng.integers(1, 50)))
            cancel = (
                engine.registry.steps.count + int(rng.integers(1, 40))
                if rng.random() < 0.2
                else 10**9
            )
            going.append((engine.submit(prompt, sampling), cancel, turn, before))

        for _ in range(4):
            say(
                opening[: int(rng.integers(0, 70))]
                + rng.integers(0, 256, rng.integers(1, 40)).tolist(),
                1,
                10**9,
            )
        while going:
            for talk in list(going):
                handle, cancel, turn, before = talk
                if engine.registry.steps.count >= cancel:
                    handle.cancel()
                if handle.finish_reason and rng.random() < 0.5:
                    going.remove(talk)
                    done.append(handle)
                    reused += max(0, handle.request.prefix.cached - before)
                    said = [*handle.request.prompt, *handle.tokens]
                    if rng.random() < 0.2:  # as if retokenized or edited
                        said = said[: int(rng.integers(1, len(said) + 1))]
                    if turn < 3:
                        more = rng.integers(0, 256, rng.integers(1, 20)).tolist()
                        say(said + more, turn + 1, len(handle.request.prompt))
            engine.step()
            check(engine)
    alone = [plain.submit(handle.request.prompt, handle.sampling) for handle in done]
    differ = sum(
        handle.tokens != other.result().tokens[: len(handle.tokens)]
        for handle, other in zip(done, alone, strict=True)
    )
    assert len(done) == 12
    restored = sum(h.request.prefix.cached for h in done if h.request.prefix.cached_from == "disk")
    return sum(len(handle.tokens) for handle in done), differ, reused, restored


def test_random_conversations_with_prefix_cache(parts, plain):
    """Some turns are cancelled, and some edit the conversation so far."""
    compared, differ, reused, _ = np.sum(
        [conversations(parts, plain, seed) for seed in range(CONVERSATIONS)], axis=0
    )
    print(
        f"{compared:,} tokens of {12 * CONVERSATIONS} turns compared, {reused:,} rows of answers reused"
    )
    assert compared > 150 * CONVERSATIONS and reused > 40 * CONVERSATIONS
    assert differ == 0


def test_random_conversations_with_a_slot_cache(parts, plain, tmp_path):
    """With only one or two slots, most conversations are overwritten, saved to disk, and restored for their
    next turn."""
    count = CONVERSATIONS // 2
    folder = str(tmp_path / "slots")
    compared, differ, _, restored = np.sum(
        [conversations(parts, plain, seed, 2, slot_cache=folder) for seed in range(count)], axis=0
    )
    print(f"{compared:,} tokens of {12 * count} turns compared, {restored:,} rows from disk")
    assert compared > 150 * count and restored > 100 * count
    assert differ == 0


def test_chat_continues_after_its_own_answer():
    """The template renders the whole chat again, and an earlier answer may be tokenized differently. Rows are
    reused up to the first token that differs."""
    chat, said, told = [], [], []
    with Engine.load("demo", slots=2, max_len=256) as engine:
        for question in ("Count from 3 to 12.", "Reverse the word stone.", "What is 17 + 6?"):
            chat.append({"role": "user", "content": question})
            handle = engine.submit(chat, SamplingParams(max_tokens=40))
            result = handle.result()
            chat.append({"role": "assistant", "content": result.text})
            prompt = list(handle.request.prompt)
            agree = [a == b for a, b in zip(said[:-1], prompt, strict=False)]
            told.append((result.metrics.cached_tokens, [*agree, False].index(False), len(said) - 1))
            said = prompt + result.tokens
    assert [cached for cached, *_ in told] == [agreed for _, agreed, _ in told]
    assert told[1][1] == told[1][2] > 30, "the first answer is written in the same tokens again"
    assert told[2][1] > told[1][2] + 10
