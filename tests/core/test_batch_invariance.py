"""A request's logits have the same bits alone and in a batch: however long its neighbours are, whenever it
arrives, whatever the slot held before, and whether its prefix was computed or copied.

Bugs that would break this are planted one by one, and must be caught."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import random_batches as company
from checkpoints import Reference, make_checkpoint
from harness import Ask, exactly, random_asks, run_schedule
from planted_bugs import BUGS, plant, poisoned
from random_batches import SCHEDULES

import kv
import llama
from kernels.device import mx
from models import ops
from models.layers import Norm
from nanobatch import Engine, Model, Tokenizer
from token_choice import argmax


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Model, Tokenizer]]:
    return company.make_models(tmp_path_factory.mktemp("company"))


@pytest.mark.parametrize("form", company.forms())
def test_random_company_changes_no_bit(form):
    """The reference engine has a different number of slots, chunk size and budget. Answers are also prefilled
    as prompts. NANOBATCH_COMPANIES=1000 runs the long form."""
    found = company.run(form, SCHEDULES)
    assert not found.differ
    assert all(found._replace(differ=True)), f"{found}: something was not tried"


def test_random_company_changes_no_bit_with_int8_activations(tmp_path):
    """Activations are quantized row by row, so a row has the same bits whether it is decoded, drafted, or
    prefilled in a chunk of any width."""
    models = company.make_models(tmp_path, activations=8)
    found = sum((company.count(models, seed, rounds=1) for seed in range(4)), company.NONE)
    assert not found.differ
    assert found.compared and found.beside and found.read


def test_elementwise_tails_change_no_bit():
    """Numbers at the end of an array, which do not fill a vector register, have the same bits as elsewhere."""
    numbers = mx.random.normal((1000,), key=mx.random.key(1)) * 3
    for operation in (
        lambda x: ops.swiglu(mx.concatenate([x, x], axis=-1)),
        lambda x: ops.geglu(mx.concatenate([x, x], axis=-1)),
        mx.exp,
        mx.cos,
        mx.sin,
        mx.tanh,
        lambda x: mx.power(math.e, x),
    ):
        whole = operation(mx.repeat(numbers[:, None], 67, axis=1))
        for size in range(1, 40):
            assert mx.array_equal(operation(numbers[:size]), whole[:size, 5]), (operation, size)


def test_softmax_is_row_invariant():
    """Neighbouring rows and masked columns at the end of a row change no bit."""
    numbers = mx.random.normal((1000,), key=mx.random.key(1)) * 3
    for size in range(1, 40):
        row = mx.concatenate([numbers[:size], mx.full(size, -mx.inf)])
        together = ops.softmax(mx.stack([row, row[::-1], row]))
        assert mx.array_equal(together[2, :size], ops.softmax(numbers[:size])), size


def test_norm_is_row_invariant():
    """A row has the same bits alone and among others."""
    for width in (1, 7, 36, 64, 100, 288, 576):
        x, weight = mx.random.normal((9, width)), mx.random.normal((width,))
        norm = Norm.from_weight(weight, 1e-5)
        assert mx.array_equal(mx.concatenate([norm(x[i : i + 1]) for i in range(9)]), norm(x))


def test_argmax_ties_go_to_the_first():
    logits = mx.random.normal((7, 500))
    logits[3, 40] = logits[3, 90] = logits[3, 499] = 50.0
    logits[5, :] = 1.0
    _, ids = argmax(logits)
    assert (ids[3].item(), ids[5].item()) == (40, 0)
    assert mx.array_equal(ids, mx.argmax(logits, axis=-1, keepdims=True))


# --- planted bugs -------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(monkeypatch, examined, bug):
    """With each bug, some answer of the batch differs from mlx-lm's."""
    plant(monkeypatch, bug)
    assert not is_all_well(*examined)


@pytest.fixture(scope="module")
def examined(tmp_path_factory) -> tuple[Path, list[Ask], list[list[int]]]:
    """A model, prompts, and mlx-lm's answers, which the engine reproduces when no bug is planted."""
    folder, rng = make_checkpoint(tmp_path_factory.mktemp("examined")), np.random.default_rng(3)
    asks = random_asks(rng, 10, longest=100, tokens=16, alike=0.3)
    opening = rng.integers(0, 256, 100).tolist()
    # The same prompt with one token removed
    asks += [Ask(opening[:n] + opening[n + 1 :], 16) for n in (99, 98, 63, 63)]
    reference = Reference(folder)
    answers = [reference.greedy(ask.prompt, ask.max_tokens)[0] for ask in asks]
    assert is_all_well(folder, asks, answers)
    return folder, asks, answers


def is_all_well(folder: Path, asks: list[Ask], answers: list[list[int]]) -> bool:
    with Engine.load(folder, slots=4, max_len=192, chunk=32) as engine:
        handles = run_schedule(engine, asks, np.random.default_rng(3))
    if unfit := [handle.error for handle in handles if "TypeError" in (handle.error or "")]:
        raise TypeError(f"the bug does not fit the code any more: {unfit[0]}")
    return [handle.tokens for handle in handles] == answers


@pytest.mark.parametrize(
    "bug", ["a reach that shows", "no further than the one before", "a form by their number"]
)
def test_planted_variance_is_caught(models, monkeypatch, bug):
    """Each of these bugs was once in the code, or in an attempt to fix a bug."""
    groups, softmax, attention = kv.Window.groups.func, llama.softmax, llama.attention

    def a_reach_that_shows(q, k, *rest):
        return attention(q, k, *rest) * (1 + k.shape[2] * 1e-5)

    def no_further_than_the_one_before(self):
        first, *others = each = groups(self)
        pairs = zip(others, each, strict=False)
        return [first, *(group._replace(T=min(group.T, before.T)) for group, before in pairs)]

    def a_form_by_their_number(x, scale):
        return (
            softmax(x, scale) if math.prod(x.shape[:-1]) >= 16 else mx.softmax(x * scale, axis=-1)
        )

    planted = {
        "a reach that shows": (llama, "attention", a_reach_that_shows),
        "no further than the one before": (
            kv.Window,
            "groups",
            property(no_further_than_the_one_before),
        ),
        "a form by their number": (llama, "softmax", a_form_by_their_number),
    }
    monkeypatch.setattr(*planted[bug])
    models = [(replace(model, attention="formula"), text) for model, text in models]
    for seed in range(8):
        try:
            if company.count(models, seed, rounds=2).differ:
                return
        except AssertionError:  # not even the tokens are the same
            return
    raise AssertionError("nobody has noticed")


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("scrubbed", [True, False])
def test_nan_row_ends_its_request_alone(models, monkeypatch, scrubbed, run_ahead):
    """A row of NaN is scrubbed, because 0 x NaN is NaN even where the mask hides the row. Without the scrub,
    the slot's next owner fails, too: attention reads as many rows of its slot as its longer neighbour has,
    including the row of NaN that it has not overwritten yet. (Fused attention does not read that row.)"""
    model, text = next(
        (model, text) for model, text in models if model.table.weight.dtype == mx.float32
    )
    model = replace(model, attention="formula")
    if not scrubbed:
        monkeypatch.setattr(kv.Slab, "scrub", lambda self, *rows: None)
    good = Ask([5, 6, 7], 40)
    with Engine(
        poisoned(model, 99), text, slots=2, max_len=192, chunk=32, run_ahead=run_ahead
    ) as engine:
        alone = engine.submit(good.prompt, good.sampling()).result()
        # This request never produces the poisoned token
        longer = exactly(60, logit_bias={99: -100})
        neighbour = engine.submit([*range(14)], longer)
        bad = engine.submit([*range(40), 99, 4], good.sampling())
        after = engine.submit(good.prompt, good.sampling())
        assert bad.result().finish_reason == "error" and "finite" in bad.error and bad.tokens == []
        assert neighbour.result().finish_reason == "length"
        assert after.request.slot == bad.request.slot
        assert (after.result().tokens == alone.tokens) == scrubbed
