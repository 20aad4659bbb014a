"""A request's logits have the same bits alone and in company: whoever its neighbours are, whenever it comes, whatever
the slot held before, and whether its prompt's beginning was computed or taken over from another. And the bugs that
would break this are planted, one by one, to see them caught."""

import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint
from harness import Ask, Tap, random_asks, run_schedule

import kv
from nanobatch import Engine, Model, Runner, Sampling, Text, keeps_bits
from parts import device, ops
from parts.device import mx
from parts.ops import Dense, product
from parts.prefix import Prefixes
from sched import POLICIES

SCHEDULES = int(os.environ.get("NANOBATCH_EXACT_SCHEDULES", 200))
SHAPES = [
    {"num_key_value_heads": 1, "head_dim": 24},
    {"num_key_value_heads": 4, "hidden_size": 96, "tie_word_embeddings": True},
    {"num_key_value_heads": 2, "head_dim": 64},
    {"model_type": "qwen3", "head_dim": 16, "hidden_size": 48},
    # Widths that are no multiple of anything, where a BLAS treats the last rows and columns of a product differently.
    {"num_key_value_heads": 1, "head_dim": 12, "hidden_size": 36, "intermediate_size": 33, "vocab_size": 275},
]


def count_differences(model: Model, text: Text, seed: int) -> tuple[int, int, int]:
    """One random schedule: logit vectors compared with the same request's alone, those that differ in a bit, and
    prompt tokens whose rows were taken over from another slot."""
    rng = np.random.default_rng(seed)
    options = {
        "slots": int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 11, 16])),
        "max_len": 192,
        "chunk": int(rng.choice([32, 64])),
        "budget": int(rng.choice([1, 64, 200])),
    }
    policy, run_ahead = [*POLICIES][seed % len(POLICIES)], bool(rng.random() < 0.7)
    asks = random_asks(rng, 6, longest=120, tokens=12, cancels=0.25, alike=0.6)
    with Engine(model, text, policy=policy, run_ahead=run_ahead, **options) as engine:
        for array in (*engine.runner.slab.k, *engine.runner.slab.v):  # what an earlier owner might have left
            array[:] = mx.array(rng.standard_normal(array.shape, dtype=np.float32) * 3)
        tap = Tap(engine)
        handles = run_schedule(engine, asks, rng)
    compared = different = reused = 0
    with Engine(model, text, reuse=False, **options) as alone:
        solo_tap = Tap(alone)
        for handle, ask in zip(handles, asks, strict=True):
            solo = alone.submit(ask.prompt, ask.sampling())
            tokens = solo.result().tokens
            if handle.finish_reason != "cancelled":
                assert handle.tokens == tokens
            reused += handle.metrics.cached_tokens
            assert solo.metrics.cached_tokens == 0
            for index in range(len(handle.tokens)):
                compared += 1
                ours, theirs = tap.logits[handle.id, index], solo_tap.logits[solo.id, index]
                different += ours.tobytes() != theirs.tobytes()
    return compared, different, reused


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Model, Text]]:
    folders = [make_checkpoint(tmp_path_factory.mktemp("m"), seed=i, **shape) for i, shape in enumerate(SHAPES)]
    return [(model := Model.load(folder), Text(folder, model.config.V)) for folder in folders]


def test_no_schedule_changes_a_single_bit(models):
    counts = [count_differences(*models[seed % len(models)], seed) for seed in range(SCHEDULES)]
    compared, different, reused = map(sum, zip(*counts, strict=True))
    summary = f"{SCHEDULES} schedules, {compared:,} logit vectors, {reused:,} prompt tokens reused, {different} differ"
    print(f"\n{summary}", file=sys.stderr)
    assert compared > 15 * SCHEDULES and reused > 20 * SCHEDULES
    assert different == 0


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_a_vocabularys_product_gives_a_row_the_same_bits_wherever_it_stands(rows):
    """As many columns as it takes for the BLAS to be asked for fewer rows at once (`device.rows_at_once`)."""
    rng = np.random.default_rng(rows)
    x, weight = (mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in ((1, 1, 96), (96, 16_016)))
    y = product(mx.repeat(x, rows, axis=0), weight)
    assert mx.array_equal(y, mx.repeat(y[:1], rows, axis=0))


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_so_does_a_deep_matrix_however_it_is_stored(rows):
    """Deep enough for the BLAS to be asked which way round it takes it (`device.takes_rows`)."""
    rng = np.random.default_rng(rows)
    x, weight = (mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in ((1, 600), (200, 600)))
    y = Dense.of([(weight, None)])(mx.repeat(x, rows, axis=0))
    assert y.shape == (rows, 200) and mx.allclose(y[:1], x @ weight.T, atol=1e-4)
    assert mx.array_equal(y, mx.repeat(y[:1], rows, axis=0))


@pytest.mark.parametrize("block", [2, 8])
def test_products_in_blocks_of_rows_give_the_same_bits_too(models, monkeypatch, block):
    """Not every BLAS asks for them (`device.rows_at_once`), so here they are asked for."""
    monkeypatch.setattr(device, "rows_at_once", lambda rows, columns: block if rows > block // 2 + 1 else rows)
    for rows in (1, 2, 4, 5, 6, 8, 11, 16):
        x, weight = mx.random.normal((rows, 3, 40)), mx.random.normal((40, 96))
        assert mx.allclose(product(x, weight), x @ weight, atol=1e-4).item()
        assert product(x[:, 0], weight).shape == (rows, 96)
    results = [count_differences(*models[seed % len(models)], seed) for seed in range(6)]
    compared, different, _ = (sum(column) for column in zip(*results, strict=True))
    assert compared > 100
    assert different == 0


def test_compact_rows_give_the_same_tokens(models):
    """Other shapes, so perhaps other bits; but the choice between tokens is decided by far more than that."""
    model, text = models[0]
    for seed in range(10):
        rng = np.random.default_rng(seed)
        asks = random_asks(rng, 8, longest=100, tokens=16, cancels=0.2)
        answers = []
        for exact in (True, False):
            with Engine(model, text, slots=5, max_len=192, chunk=32, exact=exact) as engine:
                answers.append(run_schedule(engine, asks, np.random.default_rng(seed)))
        for one, other in zip(*answers, strict=True):
            shared = min(len(one.tokens), len(other.tokens))
            assert one.tokens[:shared] == other.tokens[:shared]


def test_run_ahead_and_the_plain_loop_give_the_same_tokens(models):
    model, text = models[1]
    for seed in range(10):
        rng = np.random.default_rng(seed)
        asks = random_asks(rng, 8, longest=100, tokens=16)
        answers = []
        for run_ahead in (True, False):
            with Engine(model, text, slots=3, max_len=192, chunk=32, run_ahead=run_ahead) as engine:
                answers.append([h.tokens for h in run_schedule(engine, asks, np.random.default_rng(seed))])
        assert answers[0] == answers[1]


def test_one_pass_for_a_whole_step_or_one_for_each_chunk_gives_the_same_tokens(models):
    several = 0
    for seed in range(10):
        model, text = models[seed % len(models)]
        asks, answers = random_asks(np.random.default_rng(seed), 8, longest=150, tokens=12, alike=0.4), []
        for one_pass in (True, False):
            with Engine(model, text, slots=6, max_len=192, chunk=32) as engine:
                engine.runner.one_pass = one_pass
                answers.append([h.tokens for h in run_schedule(engine, asks, np.random.default_rng(seed))])
                several += one_pass * sum(len(step.prefill) + bool(step.decode) > 1 for step in engine.snapshot().steps)
        assert answers[0] == answers[1]
    assert several > 50


def test_a_step_is_one_pass_only_where_no_rows_numbers_depend_on_how_many_there_are(models, monkeypatch):
    """The arithmetic decides, not the library's name."""
    monkeypatch.setattr(device, "blas", "mkl")
    monkeypatch.setattr(ops, "product", lambda x, weight: mx.sum(x[..., None] * weight, axis=-2))
    assert keeps_bits(models[0][0], 4, 32, 100, 16)
    monkeypatch.setattr(ops, "product", lambda x, weight: x @ weight * (1 + (x.size > 60 * x.shape[-1]) * 1e-6))
    assert not keeps_bits(models[0][0], 4, 32, 100, 16)
    monkeypatch.setattr(device, "blas", "openblas")
    assert not keeps_bits(models[0][0], 4, 32, 100, 16)


# --- teeth -------------------------------------------------------------------------------------------------------


def plant(monkeypatch, bug: str) -> None:
    init = kv.Window.__init__
    if bug == "no mask":

        def without_mask(self, *args):
            init(self, *args)
            self.mask = mx.zeros_like(self.mask)

        monkeypatch.setattr(kv.Window, "__init__", without_mask)
    elif bug == "one offset for all rows":

        def shared_offset(self, slab, slots, starts, *rest):
            init(self, slab, slots, starts, *rest)
            self.positions = mx.broadcast_to(self.positions[:1], self.positions.shape)

        monkeypatch.setattr(kv.Window, "__init__", shared_offset)
    elif bug == "a decoding row's position is off by one":

        def off_by_one(self, slab, slots, starts, L, *rest):
            init(self, slab, slots, starts, L, *rest)
            self.positions = self.positions + (L == 1)

        monkeypatch.setattr(kv.Window, "__init__", off_by_one)
    elif bug == "a row lands in its neighbour's slot":
        write = kv.Window.write

        def misplaced(self, layer, k, v):
            if self.B > 1:
                k = mx.concatenate([k[1:], k[:1]])
            write(self, layer, k, v)

        monkeypatch.setattr(kv.Window, "write", misplaced)
    elif bug == "a chunk reads no further than itself":
        monkeypatch.setattr(kv.Slab, "reach", lambda self, rows: 32)
    elif bug == "a prefix is matched one token too long":
        beginnings = Prefixes.beginnings

        def blurred(self, prompt):  # as if the last token of each chunk went unread
            return beginnings(self, tuple(token * (i % 32 != 31) for i, token in enumerate(prompt)))

        monkeypatch.setattr(Prefixes, "beginnings", blurred)
    elif bug == "a prefix is copied before it is written":
        monkeypatch.setattr(
            kv.Slab, "prefix", lambda self, slot, rows: [slab[-1:, :, :rows] * 0 for slab in (*self.k, *self.v)]
        )
    elif bug == "the newest token is a step old":
        run = Runner.run

        def stale(self, order):
            newest = mx.array(self._newest)
            flight = run(self, order)
            if order.newest:
                self._newest = newest
            return flight

        monkeypatch.setattr(Runner, "run", stale)


@pytest.mark.parametrize(
    "bug",
    [
        "no mask",
        "one offset for all rows",
        "a decoding row's position is off by one",
        "a row lands in its neighbour's slot",
        "a chunk reads no further than itself",
        "the newest token is a step old",
        "a prefix is matched one token too long",
        "a prefix is copied before it is written",
    ],
)
def test_a_planted_bug_is_caught(monkeypatch, tmp_path, bug):
    """By the reference, by the bits, or by an invariant: ten prompts in company, and no bug gets through."""

    def all_is_well() -> bool:
        reference = Reference(folder)
        rng = np.random.default_rng(3)
        asks = random_asks(rng, 10, longest=100, tokens=16, alike=0.3)
        opening = rng.integers(0, 256, 100).tolist()
        asks += [Ask(opening[:n] + opening[n + 1 :], 16) for n in (99, 98, 63, 63)]  # the same, but for one token
        with Engine.load(folder, slots=4, max_len=192, chunk=32) as engine:
            for handle, ask in zip(run_schedule(engine, asks, rng), asks, strict=True):
                if reference.greedy(ask.prompt, ask.max_tokens)[0] != handle.tokens:
                    return False
        return True

    folder = make_checkpoint(tmp_path)
    assert all_is_well()
    plant(monkeypatch, bug)
    assert not all_is_well()


def poisoned(model: Model, token: int) -> Model:
    """The same model with an embedding of NaN for one token: whoever says it gets a number that is not finite."""
    weight = np.array(model.table.weight)
    weight[:, token] = np.nan
    return replace(model, table=model.table._replace(weight=mx.array(weight)))


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("scrubbed", [True, False])
def test_a_non_finite_row_ends_its_own_request_and_its_slot_is_scrubbed(models, monkeypatch, scrubbed, run_ahead):
    """0 x NaN is NaN, even where the mask hides it. Without the scrub, the next owner of the slot is poisoned."""
    model, text = models[0]
    if not scrubbed:
        monkeypatch.setattr(kv.Slab, "scrub", lambda self, *rows: None)
    good = Ask([5, 6, 7], 40)  # long enough to read as far as the poisoned row
    with Engine(poisoned(model, 99), text, slots=2, max_len=192, chunk=32, run_ahead=run_ahead) as engine:
        alone = engine.submit(good.prompt, good.sampling()).result()
        neighbour = engine.submit([1, 2, 3], Sampling(max_tokens=20, ignore_eos=True))
        bad = engine.submit([*range(40), 99, 4], good.sampling())
        after = engine.submit(good.prompt, good.sampling())
        assert bad.result().finish_reason == "error" and "finite" in bad.error and bad.tokens == []
        assert neighbour.result().finish_reason == "length"
        assert after.request.slot == bad.request.slot
        assert (after.result().tokens == alone.tokens) == scrubbed


def test_a_prompt_cancelled_before_its_first_token_leaves_no_poison(models):
    """Nobody has looked at its numbers yet, so its slot is scrubbed, too."""
    model, text = models[0]
    with Engine(poisoned(model, 99), text, slots=1, max_len=192, chunk=32, budget=1) as engine:
        alone = engine.submit([5, 6, 7], Sampling(max_tokens=90)).result()
        bad = engine.submit([99] * 150, Sampling(max_tokens=6))
        engine.step(), engine.step()
        assert 0 < bad.request.prefilled < 150
        bad.cancel()
        assert engine.submit([5, 6, 7], Sampling(max_tokens=90)).result().tokens == alone.tokens
