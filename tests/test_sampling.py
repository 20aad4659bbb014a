"""Each request's tokens are chosen as it asked: by mlx-lm's definitions, and whoever its neighbours are."""

import math

import mlx_lm.sample_utils as peer
import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint

from nanobatch import Engine, Model, Sampling, Text
from parts import sampling
from parts.device import mx
from parts.sampling import PENALTY_CONTEXT, Pick, choose, uniform

DRAWS = 20_000
V = 272


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=2)


@pytest.fixture(scope="module")
def parts(folder) -> tuple[Model, Text]:
    return Model.load(folder), Text(folder, V)


def no_history(slots: int) -> mx.array:
    return mx.full((slots, PENALTY_CONTEXT), V, mx.int32)


# --- the definitions ---------------------------------------------------------------------------------------------

OPTIONS = {
    "temperature": {"temperature": 0.7},
    "high temperature": {"temperature": 2.5},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k beyond the short list": {"temperature": 2.0, "top_k": 100},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "a small top_p": {"temperature": 1.0, "top_p": 0.05},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "top_p, then top_k": {"temperature": 0.9, "top_p": 0.9, "top_k": 6},
    "top_p, min_p, top_k": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.05, "top_k": 8},
    "logit_bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 7: -2.0, 11: -1000.0}},
}


def expected_distribution(logits: np.ndarray, options: dict) -> np.ndarray:
    """What mlx-lm's processors and filters make of the logits, and the temperature after them."""
    x = mx.array(logits)[None]
    for process in peer.make_logits_processors(logit_bias=options.get("logit_bias")):
        x = process(mx.array([0]), x)
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    if options.get("top_p", 1) < 1:
        x = peer.apply_top_p(x, options["top_p"])
    if options.get("min_p"):
        x = peer.apply_min_p(x, options["min_p"])
    if options.get("top_k"):
        x = peer.apply_top_k(x, options["top_k"])
    return np.array(mx.softmax(x / options["temperature"], axis=-1)[0], dtype=np.float64)


@pytest.mark.parametrize("name", OPTIONS)
def test_over_twenty_thousand_draws_the_frequencies_are_those_of_mlx_lms_definition(name):
    """Each token's count lies within five standard deviations, and no token comes that mlx-lm would filter."""
    options = OPTIONS[name]
    logits = np.random.default_rng(3).standard_normal(V).astype(np.float32) * 2.5
    expected = expected_distribution(logits, options)
    counts = np.zeros(V)
    batch = 500
    for start in range(0, DRAWS, batch):
        picks = [Pick(slot, Sampling(**options), seed=11, index=start + slot) for slot in range(batch)]
        tokens, _ = choose(mx.broadcast_to(mx.array(logits), (batch, V)), range(batch), picks, no_history(batch))
        counts += np.bincount(np.array(tokens), minlength=V)
    assert counts.sum() == DRAWS
    assert not counts[expected < 1e-12].any(), "a token came that should have been filtered"
    deviation = np.abs(counts - DRAWS * expected) / np.sqrt(DRAWS * expected * (1 - expected) + 1)
    assert deviation.max() < 5, f"token {deviation.argmax()}"
    # All tokens together, by the chi-square over those that are not rare: its mean is the degrees of freedom.
    common = expected * DRAWS > 5
    if common.sum() > 1:
        chi2 = ((counts - DRAWS * expected) ** 2 / (DRAWS * expected + 1e-30))[common].sum()
        assert chi2 < common.sum() + 5 * math.sqrt(2 * common.sum())


def test_the_noise_is_even_and_no_two_seeds_or_positions_share_it():
    draws = np.array([[uniform(seed, index) for index in range(200)] for seed in range(200)])
    assert draws.min() > 0 and draws.max() < 1
    assert np.abs(np.histogram(draws, bins=10, range=(0, 1))[0] / draws.size - 0.1).max() < 0.01
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.02
    assert uniform(-1, 5) != uniform(1, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"logit_bias": {5: 3.0, 100: -50.0}},
        {"repetition_penalty": 3.0, "logit_bias": {9: 2.5}},
    ],
)
@pytest.mark.parametrize("length", [1, 7, 40])
def test_penalty_and_bias_change_greedy_answers_as_in_mlx_lm(folder, parts, options, length):
    """mlx-lm's own processors, step by step, on the last 20 tokens of prompt and answer."""
    prompt = np.random.default_rng(length).integers(0, 250, length).tolist()
    reference, tokens = Reference(folder), []
    processors = peer.make_logits_processors(**options)
    for _ in range(30):
        x = mx.array(reference.logits(prompt + tokens)[-1:])
        for process in processors:
            x = process(mx.array(prompt + tokens), x)
        tokens.append(int(mx.argmax(x[0]).item()))
    with Engine(*parts, slots=3, max_len=128, chunk=32) as engine:
        neighbour = engine.submit([1, 2], Sampling(max_tokens=25, repetition_penalty=1.2))
        handle = engine.submit(prompt, Sampling(max_tokens=30, ignore_eos=True, **options))
        assert handle.result().tokens == tokens
        neighbour.result()


# --- in company --------------------------------------------------------------------------------------------------

EIGHT = [
    Sampling(max_tokens=24, ignore_eos=True),
    Sampling(max_tokens=20, ignore_eos=True, temperature=0.8, seed=1),
    Sampling(max_tokens=28, ignore_eos=True, temperature=1.5, top_k=10, seed=2),
    Sampling(max_tokens=16, ignore_eos=True, temperature=1.0, top_p=0.9, seed=2),
    Sampling(max_tokens=22, ignore_eos=True, temperature=1.2, min_p=0.05, repetition_penalty=1.3, seed=3),
    Sampling(max_tokens=26, ignore_eos=True, repetition_penalty=2.0),
    Sampling(max_tokens=18, ignore_eos=True, logit_bias={7: 5.0}, logprobs=3),
    Sampling(max_tokens=24, temperature=3.0, top_k=150, top_p=0.99, seed=4, stop=["e", 40], logprobs=0),
]


def fingerprint(result) -> tuple:
    return result.tokens, result.text, result.finish_reason, result.logprobs


@pytest.mark.parametrize("slots", [8, 3])
def test_eight_different_samplings_in_one_batch_are_each_what_they_are_alone(parts, slots):
    prompts = [[n, 10 * n + 3, 7] * (1 + n) for n in range(8)]
    with Engine(*parts, slots=slots, max_len=128, chunk=32) as engine:
        alone = [fingerprint(engine.submit(*pair).result()) for pair in zip(prompts, EIGHT, strict=True)]
        assert len({tuple(tokens) for tokens, *_ in alone}) == 8
        for order in (range(8), reversed(range(8)), [3, 1, 7, 5, 0, 2, 6, 4]):
            handles = {n: engine.submit(prompts[n], EIGHT[n]) for n in order}
            for n, handle in handles.items():
                assert fingerprint(handle.result()) == alone[n], f"request {n} of {slots} slots"


def test_seeds_make_answers_repeat_and_differ(parts):
    hot = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.5}
    with Engine(*parts, slots=4, max_len=128) as engine:
        seeded = [engine.submit([1, 2], Sampling(seed=5, **hot)) for _ in range(3)]
        assert len({tuple(handle.result().tokens) for handle in seeded}) == 1
        others = [engine.submit([1, 2], Sampling(seed=seed, **hot)) for seed in (5, 6, 7, -5, 2**63)]
        assert len({tuple(handle.result().tokens) for handle in others}) == 5
        unseeded = [engine.submit([1, 2], Sampling(**hot)) for _ in range(5)]
        assert len({tuple(handle.result().tokens) for handle in unseeded}) == 5


def test_a_greedy_batch_pays_for_no_sampling(parts, monkeypatch):
    """And a mixed one runs one sampler for each kind of work, not one for each row."""
    calls = []
    real = sampling.draw
    monkeypatch.setattr(
        sampling, "draw", lambda x, picks, group: calls.append((group, len(picks))) or real(x, picks, group)
    )
    with Engine(*parts, slots=8, max_len=128) as engine:
        monkeypatch.setattr(sampling, "edit", lambda *args: pytest.fail("a greedy row was edited"))
        engine.generate([[n] for n in range(8)], Sampling(max_tokens=5, ignore_eos=True))
        assert not calls
        monkeypatch.undo()
        monkeypatch.setattr(
            sampling, "draw", lambda x, picks, group: calls.append((group, len(picks))) or real(x, picks, group)
        )
        hot = Sampling(max_tokens=9, ignore_eos=True, temperature=1.0, seed=1)
        engine.generate([[n] for n in range(8)], hot)
        assert ("open", 8) in calls


def test_logprobs_are_those_of_the_model(folder, parts):
    with Engine(*parts, slots=2, max_len=128) as engine:
        neighbour = engine.submit([4], Sampling(max_tokens=12, logprobs=1, ignore_eos=True))
        result = engine.submit([1, 2, 3], Sampling(max_tokens=12, logprobs=5, ignore_eos=True)).result()
        plain = engine.submit([1, 2, 3], Sampling(max_tokens=12, ignore_eos=True)).result()
        assert all(len(entry.top) == 1 for entry in neighbour.result().logprobs)
    assert plain.logprobs is None and plain.tokens == result.tokens
    logits = Reference(folder).logits([1, 2, 3, *result.tokens[:-1]])[2:].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(result.logprobs) == 12
    for token, entry, row in zip(result.tokens, result.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.top[0][0] == token and len(entry.top) == 5
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:5].tolist(), abs=1e-4)


def test_max_tokens_none_goes_to_the_end_of_the_slot(parts):
    with Engine(*parts, slots=1, max_len=100) as engine:
        result = engine.submit([1] * 10, Sampling(max_tokens=None, ignore_eos=True)).result()
        assert len(result.tokens) == 90 and result.finish_reason == "length"
        with pytest.raises(ValueError, match=r"100.*100"):
            engine.submit([1] * 100, Sampling(max_tokens=None))


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, 2**63, "hot", True)],
        *[("top_p", value) for value in (0, 0.0, -1, 1.01, math.nan, None)],
        *[("top_k", value) for value in (-1, 1.5, "all", True)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("seed", value) for value in (1.5, "x", True, 2**64)],
        *[("repetition_penalty", value) for value in (0, -1, math.nan, math.inf)],
        *[("logprobs", value) for value in (-1, 101, 1.0, True)],
        *[("max_tokens", value) for value in (0, -1, 2.0, "9", True)],
        *[("stop", value) for value in ("", ["a", ""], [1.5], [None], 2.5, True)],
        *[
            ("logit_bias", value)
            for value in ([1], {"a": 1}, {1: "b"}, {1: math.nan}, {1: math.inf}, {1: 10**400}, {True: 1})
        ],
        ("ignore_eos", 1),
    ],
)
def test_an_impossible_setting_is_refused_at_once_with_its_name(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        Sampling(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"stop": [272]}, {"stop": -1}, {"logit_bias": {272: 1.0}}])
def test_a_setting_that_names_a_token_outside_the_vocabulary_is_refused_at_submit(parts, settings):
    with Engine(*parts, slots=1, max_len=64) as engine, pytest.raises(ValueError, match=r"(272|-1).*272"):
        engine.submit([1], Sampling(max_tokens=4, **settings))
