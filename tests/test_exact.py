"""A request's logits have the same bits alone and in company: however long its neighbours are, whenever it comes,
whatever the slot held before, and whether its prompt's beginning was computed or taken over from another. And the bugs
that would break this are planted, one by one, to see them caught."""

import math
import os
from dataclasses import replace
from pathlib import Path

import company
import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint
from company import ELSEWHERE, SCHEDULES, Count
from harness import Ask, random_asks, run_schedule

import kv
import nanobatch
from nanobatch import Engine, Model, Runner, Sampling, Text, keeps_bits
from parts import load, ops
from parts.device import mx
from parts.ops import Dense, gives_same_bits, product, rows_alike
from parts.prefix import Prefixes
from sched import PADDING


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Model, Text]]:
    return company.make_models(tmp_path_factory.mktemp("company"))


def test_no_company_changes_a_single_bit_on_any_blas_and_any_of_its_kernels(everywhere, capsys):
    """Bits depended on a neighbour's length from 190 rows on, and the tests never went that far."""
    with capsys.disabled():
        print()
        lines = [print(line := each.strip(), flush=True) or line for each in everywhere.stdout]
    assert len(lines) >= (2 if company.sys.platform == "linux" else 1) and len(lines) == len(company.everywhere())
    taken = "mlx", str(company.device.blas)
    for line in lines:
        assert line.endswith(" 0 differ"), line
        count, compared, beside, reused = (int(line.split(f" {what}")[0].split()[-1].replace(",", "")) for what in WHAT)
        assert count == (SCHEDULES if line.startswith(taken) else ELSEWHERE), line
        assert compared > 12 * count and beside > 6 * count and reused > 10 * count


WHAT = ("schedules", "logit vectors", "of them beside", "prompt tokens reused")


def test_the_blas_whose_kernels_were_asked_for_runs_them(models):
    """The kernels were taken for granted by the processor's name, while the library ran others."""
    named = [each.partition(":")[2] for each in company.everywhere() if ":" in each]
    for kernels in named:
        code = "from parts import device; print(device.blas.kernels)"
        environment = os.environ | {"NANOBATCH_BLAS": f"openblas:{kernels}", "OPENBLAS_CORETYPE": "Prescott"}
        done = company.subprocess.run(
            [company.sys.executable, "-c", code], cwd=company.ROOT, env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip().lower() == kernels.lower(), done


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7, 8, 11, 16, 33])
@pytest.mark.parametrize("inputs, outputs", [(96, 16_016), (600, 200), (1030, 100), (36, 33)])
def test_a_product_gives_a_row_the_same_bits_wherever_it_stands(rows, inputs, outputs):
    """As many columns as it takes for a BLAS to be asked for fewer rows at once, as deep as it takes to be asked which
    way round it takes a matrix, and sizes that are no multiple of anything."""
    rng = np.random.default_rng(rows)
    x, weight = (mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in ((1, inputs), (outputs, inputs)))
    y = Dense.of([(weight, None)])(mx.repeat(x, rows, axis=0))
    assert y.shape == (rows, outputs) and mx.allclose(y[:1], x @ weight.T, atol=1e-3)
    assert mx.array_equal(y, mx.repeat(y[:1], rows, axis=0))


def sensitive(is_off):
    """A product that is a little off in the last row, if it has so many rows, and else has the same bits everywhere."""

    def multiply(x, weight):
        y = mx.sum(x[..., None] * weight, axis=-2)
        if is_off(math.prod(x.shape[:-1])):
            y = y * mx.where(mx.arange(y.shape[-2])[:, None] == y.shape[-2] - 1, 1.001, 1)
        return y

    return multiply


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(ops, "_tried", {})


def test_rows_are_multiplied_together_only_if_none_gets_other_bits_in_another_place(monkeypatch, untried):
    weight = mx.random.normal((40, 96))
    monkeypatch.setattr(mx, "matmul", sensitive(lambda rows: rows > 4))
    assert [rows_alike(rows, weight) for rows in (1, 2, 3, 4, 5, 8, 16)] == [1, 2, 3, 4, 4, 4, 4]
    ops._tried.clear()
    monkeypatch.setattr(mx, "matmul", sensitive(lambda rows: rows % 8 and rows != 1))
    assert [rows_alike(rows, weight) for rows in (1, 3, 5, 8, 16, 17)] == [1, 1, 8, 8, 16, 8]
    for rows in (1, 3, 5, 8, 16, 17):
        x = mx.random.normal((rows, 3, 40))
        assert product(x[:, 0], weight).shape == (rows, 96)
        assert mx.allclose(product(x, weight), x @ weight, atol=0.1).item()


def test_chunks_and_decoding_rows_share_a_pass_only_if_no_width_that_a_pass_can_have_gives_other_bits(
    models, monkeypatch, untried
):
    """A few widths were tried, and a deep, narrow matrix took another path at one that was not: 64 to 240 rows."""
    model, slots, chunk = models[0][0], 4, 64
    seen: set[int] = set()

    def multiply(x, weight):
        if x.ndim == 2 and weight.shape[0] == model.config.D:
            seen.add(x.shape[0])
        return x @ weight

    monkeypatch.setattr(load, "gives_same_bits", lambda *args: True)
    monkeypatch.setattr(ops, "rows_alike", lambda rows, *rest: rows)  # whatever this machine's BLAS would need
    monkeypatch.setattr(mx, "matmul", multiply)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        with Engine(
            *models[0], slots=slots, max_len=192, chunk=chunk, budget=int(rng.choice([70, 200, 400]))
        ) as engine:
            run_schedule(engine, random_asks(rng, 12, longest=150, tokens=6), rng)
    monkeypatch.setattr(load, "gives_same_bits", gives_same_bits)
    widths = {width for width in seen if width > slots}
    assert len(widths) > 8 and max(widths) <= load.WIDEST_PASS + slots
    for budget in (70, 200, 1_000_000):
        monkeypatch.setattr(mx, "matmul", sensitive(lambda rows: rows > load.WIDEST_PASS + slots))
        ops._tried.clear()
        assert keeps_bits(model, slots, chunk, budget, PADDING), "nothing wider than a pass is tried"
    for width in widths:
        monkeypatch.setattr(mx, "matmul", sensitive(lambda rows, width=width: rows == width))
        ops._tried.clear()
        assert not keeps_bits(model, slots, chunk, 400, PADDING), f"{width} rows were not tried"


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


# --- teeth -------------------------------------------------------------------------------------------------------


def plant(monkeypatch, bug: str) -> None:
    init, looks = kv.Window.__init__, kv.Window.looks
    if bug == "no mask":

        def without_mask(self, *args):
            return [look._replace(mask=mx.zeros_like(look.mask)) for look in looks(self, *args)]

        monkeypatch.setattr(kv.Window, "looks", without_mask)
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
        monkeypatch.setattr(kv.Slab, "reach", lambda self, rows, decoding: 32)
    elif bug == "a prefix is matched one token too long":
        beginnings = Prefixes.beginnings

        def blurred(self, prompt, *after):  # as if the last token of each chunk went unread
            return beginnings(self, tuple(token * (i % 32 != 31) for i, token in enumerate(prompt)), *after)

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
def test_a_planted_bug_is_caught(monkeypatch, examined, bug):
    """By the reference, by the bits, or by an invariant: ten prompts in company, and no bug gets through."""
    plant(monkeypatch, bug)
    assert not is_all_well(*examined)


@pytest.fixture(scope="module")
def examined(tmp_path_factory) -> tuple[Path, list[Ask], list[list[int]]]:
    """A model, prompts, and mlx-lm's answers, which are the engine's as long as no bug is planted."""
    folder, rng = make_checkpoint(tmp_path_factory.mktemp("examined")), np.random.default_rng(3)
    asks = random_asks(rng, 10, longest=100, tokens=16, alike=0.3)
    opening = rng.integers(0, 256, 100).tolist()
    asks += [Ask(opening[:n] + opening[n + 1 :], 16) for n in (99, 98, 63, 63)]  # the same, but for one token
    reference = Reference(folder)
    answers = [reference.greedy(ask.prompt, ask.max_tokens)[0] for ask in asks]
    assert is_all_well(folder, asks, answers)
    return folder, asks, answers


def is_all_well(folder: Path, asks: list[Ask], answers: list[list[int]]) -> bool:
    with Engine.load(folder, slots=4, max_len=192, chunk=32) as engine:
        return [handle.tokens for handle in run_schedule(engine, asks, np.random.default_rng(3))] == answers


def see_how_far_attention_reads(monkeypatch) -> None:
    """Attention's numbers show T, so that T shows in the bits on every BLAS, also where it adds up in a plain order."""
    attention = nanobatch.attention
    monkeypatch.setattr(nanobatch, "attention", lambda q, k, *rest: attention(q, k, *rest) * (1 + k.shape[2] * 1e-5))


def test_how_far_a_request_reads_depends_on_no_neighbour(models, monkeypatch):
    see_how_far_attention_reads(monkeypatch)
    total = sum((company.count(models, seed, rounds=2) for seed in range(8)), Count(0, 0, 0, 0))
    assert total.beside > 100 and total.differ == 0


@pytest.mark.parametrize("bug", ["as far as the longest", "no further than the one before", "a form by their number"])
def test_a_bug_in_how_neighbours_share_a_product_is_caught(models, monkeypatch, bug):
    """Each was once in the code, or in a try to mend it."""
    see_how_far_attention_reads(monkeypatch)
    looks, softmax = kv.Window.looks, nanobatch.softmax

    def as_far_as_the_longest(self, *form):
        reaches = [self.slab.reach(row + self.L, self.L == 1) for row in self.starts if row != self.slab.spare]
        self.slab.reach = lambda *_: max(reaches)
        try:
            return looks(self, *form)
        finally:
            del self.slab.reach

    def no_further_than_the_one_before(self, *form):
        each = looks(self, *form)
        capped = [look._replace(T=min(look.T, before.T)) for look, before in zip(each[1:], each, strict=False)]
        return each[:1] + [look._replace(mask=look.mask[..., : look.T]) for look in capped]

    def a_form_by_their_number(x):
        return softmax(x) if math.prod(x.shape[:-1]) >= 16 else mx.softmax(x, axis=-1)

    if bug == "a form by their number":
        monkeypatch.setattr(nanobatch, "softmax", a_form_by_their_number)
    else:
        monkeypatch.setattr(kv.Window, "looks", locals()[bug.replace(" ", "_")])
    for seed in range(8):  # as many as the test above takes
        try:
            if company.count(models, seed, rounds=2).differ:
                return
        except AssertionError:  # not even the tokens are the same
            return
    raise AssertionError("nobody has noticed")


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
