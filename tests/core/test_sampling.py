"""Each request's tokens follow its own settings and mlx-lm's definitions, in any batch."""

import math

import mlx_lm.sample_utils as peer
import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint
from harness import exactly
from kinds import KINDS

import sampling
from kernels.device import mx
from models.load import read_model
from nanobatch import Engine, Model, SamplingParams, Tokenizer
from sampling import SamplingRow, SlotBiases, apply_penalties, sample
from token_choice import inverse_cdf

DRAWS = 20_000
V = 272


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=2)


@pytest.fixture(scope="module")
def parts(folder) -> tuple[Model, Tokenizer]:
    return read_model(folder), Tokenizer(folder, V)


@pytest.fixture(params=["sorted", "bisected"])
def how(request, monkeypatch) -> str:
    """Run the test with sorting and with bisection, since a vocabulary as small as the test's is always
    sorted."""
    monkeypatch.setattr(sampling, "SORTABLE", sampling.SORTABLE if request.param == "sorted" else 0)
    return request.param


# --- the definitions ----------------------------------------------------------------------------

OPTIONS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k beyond the short list": {"temperature": 2.0, "top_k": 100},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "a small top_p": {"temperature": 1.0, "top_p": 0.05},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "top_p and a top_k beyond the short list": {"temperature": 3.0, "top_p": 0.97, "top_k": 70},
    "top_p, min_p, top_k": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.05, "top_k": 8},
    "logit_bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 7: -2.0, 11: -1000.0}},
}


def expected_distribution(logits: np.ndarray, options: dict) -> np.ndarray:
    """Return the distribution after mlx-lm's processors, filters and temperature."""
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
def test_frequencies_of_20000_draws(name):
    """Each token's count is within five standard deviations, and no token that mlx-lm filters is drawn."""
    options = OPTIONS[name]
    logits = np.random.default_rng(3).standard_normal(V).astype(np.float32) * 2.5
    expected = expected_distribution(logits, options)
    counts = np.zeros(V)
    batch, asked = 500, SamplingParams(**options)
    for start in range(0, DRAWS, batch):
        picks = [SamplingRow(slot, asked, seed=11, index=start + slot) for slot in range(batch)]
        tokens, _ = sample(
            mx.broadcast_to(mx.array(logits), (batch, V)), picks, SlotBiases(batch, V)
        )
        counts += np.bincount(np.array(tokens), minlength=V)
    assert counts.sum() == DRAWS
    assert not counts[expected < 1e-12].any(), "a token came that should have been filtered"
    deviation = np.abs(counts - DRAWS * expected) / np.sqrt(DRAWS * expected * (1 - expected) + 1)
    assert deviation.max() < 5, f"token {deviation.argmax()}"
    # The chi-square of all tokens that are not rare. Its mean is the number of degrees of freedom.
    common = expected * DRAWS > 5
    if common.sum() > 1:
        chi2 = ((counts - DRAWS * expected) ** 2 / (DRAWS * expected + 1e-30))[common].sum()
        assert chi2 < common.sum() + 5 * math.sqrt(2 * common.sum())


def test_penalties_count_the_answer_alone():
    """A short answer is padded with its first token, and the padding is not counted. Neither is the prompt."""
    asked = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    answers = [(), (5,), (5, 6, 5)]
    picks = [
        SamplingRow(slot, asked, 0, len(said), (9, *said)) for slot, said in enumerate(answers)
    ]
    x = apply_penalties(mx.zeros((3, 8)), picks, SlotBiases(3, 8)).tolist()
    assert x[0] == [0] * 8
    assert x[1] == [0, 0, 0, 0, 0, -1.5, 0, 0]
    assert x[2] == [0, 0, 0, 0, 0, -2.0, -1.5, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": -0.3, "presence_penalty": 2},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    ],
)
def test_penalties_and_bias(folder, make_engine, options):
    """OpenAI's definition: `frequency_penalty` counts each occurrence in the answer, and `presence_penalty`
    counts once. The prompt does not count. The repetition penalty is mlx-lm's."""
    prompt = [7, 7, 9]
    asked = exactly(90, **options)  # more than one block of 64 tokens
    answers = []
    for run_ahead in (True, False):
        engine = make_engine(slots=3, run_ahead=run_ahead)
        for tokens in (5, 70):
            engine.submit([1, 2], SamplingParams(max_tokens=tokens, frequency_penalty=1))
        # One of the two gets a slot that another request has used
        answers += [engine.submit(prompt, asked) for _ in range(2)]
        assert engine.submit(prompt, exactly(90)).result().tokens != answers[0].result().tokens
    tokens = answers[0].tokens
    assert [handle.result().tokens for handle in answers] == [tokens] * 4
    (process,) = peer.make_logits_processors(
        repetition_penalty=options.get("repetition_penalty", 1.0001)
    )
    logits = Reference(folder).logits(prompt + tokens)[len(prompt) - 1 : -1]
    for n, (x, token) in enumerate(zip(logits, tokens, strict=True)):
        x = x.copy()
        for biased, bias in options.get("logit_bias", {}).items():
            x[biased] += bias
        if "repetition_penalty" in options:
            x = np.array(process(mx.array(prompt + tokens[:n]), mx.array(x)[None])[0])
        counts = np.bincount(np.array(tokens[:n], int), minlength=len(x))
        x -= options.get("presence_penalty", 0) * (counts > 0)
        x -= options.get("frequency_penalty", 0) * counts
        assert x.argmax() == token, n


# --- large vocabularies, ties, and values that are not finite -----------------------------------


def picks_of(kinds: list[str], at: int = 0) -> list[SamplingRow]:
    """Return a sampling row for each kind of settings, in consecutive slots from `at` on."""
    return [
        SamplingRow(
            at + i, SamplingParams(**KINDS[kind]), seed=i, index=4, before=(3, 1 + i, 3, 5, 3)
        )
        for i, kind in enumerate(kinds)
    ]


def outcome(logits: np.ndarray, picks: list[SamplingRow], slots: int = 32) -> dict[int, tuple]:
    """Return the token of each slot, and the bits of the requested log probabilities."""
    tokens, parts = sample(mx.array(logits), picks, SlotBiases(slots, logits.shape[-1]))
    measured = {row.slot: output.logprob[:2] for part in parts for row, output in part.by_row()}
    found = {}
    for pick, token in zip(picks, tokens.tolist(), strict=True):
        own, top = measured.get(pick.slot, (None, ()))
        found[pick.slot] = token, own, top[: pick.sampling.logprobs]
    return found


@pytest.mark.parametrize("size", [61, 271, 4_160, 5_003, 152_064])
def test_sampling_is_row_invariant(size):
    """Every kind of sampling is batch-invariant with small and large vocabularies, whether their size is odd,
    prime, or a multiple of a block."""
    rng = np.random.default_rng(size)
    kinds = [kind for kind in KINDS if size > 200 or kind != "logit_bias"]
    logits = (rng.standard_normal((len(kinds), size)) * 2).astype(np.float32)
    alone = {
        pick.slot: outcome(logits[i : i + 1], [pick])[pick.slot]
        for i, pick in enumerate(picks_of(kinds))
    }
    assert all(0 <= token < size for token, *_ in alone.values())
    for count in (2, 5, len(kinds)):
        some = rng.permutation(len(kinds))[:count]
        picks = [picks_of(kinds)[i] for i in some]
        for slot, found in outcome(logits[some], picks).items():
            assert found == alone[slot], kinds[slot]
    for i, kind in enumerate(kinds):  # each row among others of its kind
        neighbours = picks_of([kind] * 16)
        place = int(rng.integers(16))
        neighbours[place] = picks_of(kinds)[i]._replace(slot=place)
        rows = (rng.standard_normal((16, size)) * 2).astype(np.float32)
        rows[place] = logits[i]
        assert outcome(rows, neighbours)[place] == alone[i], kind


@pytest.mark.parametrize(
    "size, k", [(5, 5), (64, 20), (271, 3), (320, 64), (5_003, 1), (5_003, 100), (152_064, 20)]
)
@pytest.mark.parametrize("levels", [2, 40, 10**9])
def test_top_tokens_without_a_sort(size, k, levels):
    """Among equal numbers the lowest index comes first, also across blocks. With two levels nearly all
    numbers are equal."""
    gaps = np.random.default_rng(k).integers(0, levels, (3, size)).astype(np.float32)
    gaps[1, : size // 2] = math.inf
    found = np.array(sampling.likeliest(mx.array(gaps), k))
    assert np.array_equal(found, np.argsort(gaps, axis=-1, kind="stable")[:, :k])


def test_bisection_keeps_what_a_sort_would_keep():
    """Bisection keeps the same tokens as sorting, whichever filter of a row is the strictest."""
    rng, compared = np.random.default_rng(8), 0
    for levels, widest in [(3, 9), (50, 9), (10**6, 9), (10**6, 1e-3), (10**6, 900)]:
        x = rng.integers(0, levels, (24, 640)).astype(np.float32) * np.float32(widest / levels)
        settings = [
            SamplingParams(
                temperature=1,
                top_k=int(rng.choice([0, 1, 66, 200, 640, 10**9])),
                top_p=float(rng.choice([1, 1 - 1e-6, 0.997, 0.61, 0.3, 1e-3, 1e-60])),
                min_p=float(rng.choice([0, 0.001, 0.2, 1])),
            )
            for _ in x
        ]
        spread = sampling.Spread.from_logits(mx.array(x))
        filters = sampling.Filters.from_settings(settings, spread)
        order = sampling.likeliest(spread.gap, 640)
        first = sampling.keep_first(spread.only(order), filters)
        wanted = np.zeros(x.shape, bool)
        np.put_along_axis(wanted, np.array(order).astype(int), np.array(first), axis=-1)
        kept = np.array(
            sampling.keep_nearest(
                spread.gap, spread.weights, spread.total, filters.count, filters.mass
            )
        )
        for gap in filters.gaps:  # `draw` applies these after the other filters
            near = np.array(spread.gap <= gap)
            wanted &= near
            kept &= near
        for row, setting in enumerate(settings):
            assert np.array_equal(kept[row], wanted[row]), setting
        assert kept.any(axis=-1).all()
        compared += len({int(count) for count in kept.sum(axis=-1)})
    assert compared > 30


@pytest.mark.parametrize(
    "options, kept",
    [
        # Four tokens of 0.25 each: the two before the third already add up to 0.5
        ({"top_p": 0.5}, [2, 3]),
        ({"top_p": 0.51}, [2, 3, 66]),
        ({"top_k": 3}, [2, 3, 66]),
        ({"top_k": 65}, [2, 3, 66, 69]),
        ({"min_p": 1.0}, [2, 3, 66, 69]),
        ({"top_p": 0.8, "top_k": 65}, [2, 3, 66, 69]),
        ({"top_p": 0.7, "top_k": 2, "min_p": 0.5}, [2, 3]),
    ],
)
def test_filter_ties_keep_the_lowest_ids(options, kept, how):
    logits = np.full((200, V), -40, np.float32)
    logits[:, [2, 3, 66, 69]] = 1
    picks = [
        SamplingRow(i, SamplingParams(temperature=1, **options), seed=1, index=i)
        for i in range(200)
    ]
    tokens, _ = sample(mx.array(logits), picks, SlotBiases(200, V))
    assert sorted(set(tokens.tolist())) == kept


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all nan", "all -inf", "all inf"])
def test_non_finite_row_has_no_token(bad, how):
    """A row with a number that is not finite yields no token, although comparisons silently ignore a NaN."""
    picks = picks_of([*KINDS, *KINDS])
    logits = np.random.default_rng(2).standard_normal((len(picks), V)).astype(np.float32)
    good = outcome(logits, picks)
    half = len(KINDS)
    if isinstance(bad, str):
        logits[:half] = float(bad.split()[1])
    else:
        logits[:half, 130] = bad
    found = outcome(logits, picks)
    assert [found[slot][0] for slot in range(half)] == [-1] * half
    assert all(found[slot] == good[slot] for slot in range(half, 2 * half))


@pytest.mark.parametrize("kind", KINDS)
def test_minus_infinity_forbids_a_token(kind, how):
    """A model may mask unused ids with -inf, even most of the vocabulary and both its ends."""
    logits = np.full((100, V), -math.inf, np.float32)
    logits[:, [70, 71, 200]] = [1, 2, 1.5]
    picks = [pick._replace(index=i, before=()) for i, pick in enumerate(picks_of([kind] * 100))]
    found = outcome(logits, picks, slots=100)
    tokens = {token for token, *_ in found.values()}
    assert tokens <= {70, 71, 200} and (len(tokens) > 1) == (picks[0].sampling.temperature > 0)


def test_small_weights_are_not_lost():
    """One token has weight 1, and 152,000 others have 1e-8 each: 0.15 % together. A float32 sum that has
    reached 1 no longer grows by 1e-8, however often it is added."""
    weights = np.full((1, 152_000), 1e-8, np.float32)
    weights[0, 0] = 1
    draws = [
        inverse_cdf(mx.array(weights), mx.array([[u]])).item() for u in (0.5, 0.998, 0.999, 0.9999)
    ]
    assert draws[:2] == [0, 0] and draws[2:] == pytest.approx([51_900, 141_985], rel=0.01)


@pytest.mark.parametrize("size", [64, 320, 4_160, 152_064])
def test_inverse_cdf_draw(size):
    """A draw is the first token whose running sum exceeds u, and never one with weight 0."""
    rng = np.random.default_rng(size)
    rows = np.arange(40)
    weights = rng.random((40, size), np.float32) * (rng.random((40, size), np.float32) < 0.2)
    weights[:, -1] = 0
    u = rng.integers(0, 2**22, 40)
    u[:4] = [0, 1, 2**22 - 2, 2**22 - 1]
    u = ((u + 0.5) / 2**22).astype(np.float32)
    places = np.array(inverse_cdf(mx.array(weights), mx.array(u)[:, None]))[:, 0]
    sums = weights.astype(np.float64).cumsum(axis=-1)
    found = sums[rows, places]
    share, before = found / sums[:, -1], (found - weights[rows, places]) / sums[:, -1]
    assert (weights[rows, places] > 0).all()
    assert (before - 1e-6 <= u).all() and (u <= share + 1e-6).all()


def test_no_sampling_sorts_a_large_vocabulary(monkeypatch):
    """Regression: sorting the vocabulary took as long as ten steps. At most a few thousand numbers are
    sorted."""
    size, longest = 152_064, []
    for name in ("sort", "argsort", "partition", "argpartition"):
        real = getattr(mx, name)

        def spy(x, *args, real=real, **options):
            longest.append(x.shape[-1])
            return real(x, *args, **options)

        monkeypatch.setattr(mx, name, spy)
    outcome(np.zeros((len(KINDS), size), np.float32), picks_of(list(KINDS)))
    assert longest and max(longest) < size / 50


def test_logit_bias_is_built_once():
    """Regression: building a bias of 100,000 entries took a second in each step."""
    state = SlotBiases(2, V)
    first, other = [SamplingParams(logit_bias={5: 1.0}).logit_bias for _ in range(2)]
    built = state.bias(0, first)
    assert state.bias(0, first) is built and built.tolist()[:7] == [0, 0, 0, 0, 0, 1, 0]
    assert state.bias(0, other) is not built
    assert not state.bias(0, SamplingParams().logit_bias).any()


def test_next_request_in_a_slot_has_its_own_bias(make_engine):
    """Biases are stored per slot, but a new request does not inherit its predecessor's."""
    wishes = [{}, {7: 100.0}, {9: 100.0}, {}, {7: 100.0}]
    engine = make_engine(slots=1, max_len=64)
    plain, *results = [
        engine.submit([1, 2], exactly(3, logit_bias=bias)).result().tokens for bias in wishes
    ]
    assert results == [[7] * 3, [9] * 3, plain, [7] * 3]


# --- in batches ---------------------------------------------------------------------------------


def fingerprint(result) -> tuple:
    return result.tokens, result.text, result.finish_reason, result.logprobs


def test_penalty_is_per_request(engine):
    """Regression: the neighbour's answer outgrew the space for penalties, so the step failed for all."""
    wishes = [
        exactly(90, logprobs=0),
        exactly(9, logprobs=0, presence_penalty=1.5),
    ]
    alone = [fingerprint(engine.submit([1, 2], wish).result()) for wish in wishes]
    longer = engine.submit([1, 2], wishes[0])
    engine.driver.wait(lambda: len(longer.tokens) > 70, engine.step)
    shorter = engine.submit([1, 2], wishes[1])
    assert [fingerprint(handle.result()) for handle in (longer, shorter)] == alone


def test_seeds_make_answers_repeat_and_differ(make_engine):
    hot = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.5}
    engine = make_engine(slots=4)
    seeded = [engine.submit([1, 2], SamplingParams(seed=5, **hot)) for _ in range(3)]
    assert len({tuple(handle.result().tokens) for handle in seeded}) == 1
    others = [
        engine.submit([1, 2], SamplingParams(seed=seed, **hot)) for seed in (5, 6, 7, -5, 2**63)
    ]
    assert len({tuple(handle.result().tokens) for handle in others}) == 5
    unseeded = [engine.submit([1, 2], SamplingParams(**hot)) for _ in range(5)]
    assert len({tuple(handle.result().tokens) for handle in unseeded}) == 5


def test_logprobs_are_those_of_the_model(folder, engine):
    neighbour = engine.submit([4], SamplingParams(max_tokens=12, logprobs=1, ignore_eos=True))
    result = engine.submit(
        [1, 2, 3], SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True)
    ).result()
    plain = engine.submit([1, 2, 3], exactly(12)).result()
    assert all(len(entry.top) == 1 for entry in neighbour.result().logprobs)
    assert plain.logprobs is None and plain.tokens == result.tokens
    logits = Reference(folder).logits([1, 2, 3, *result.tokens[:-1]])[2:].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(result.logprobs) == 12
    for token, entry, row in zip(result.tokens, result.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.top[0][0] == token and len(entry.top) == 5
        assert [value for _, value in entry.top] == pytest.approx(
            np.sort(row)[::-1][:5].tolist(), abs=1e-4
        )


def test_max_tokens_none_fills_the_slot(make_engine):
    engine = make_engine(slots=1, max_len=100)
    result = engine.submit([1] * 10, exactly(None)).result()
    assert len(result.tokens) == 90 and result.finish_reason == "length"
    with pytest.raises(ValueError, match=r"100.*100"):
        engine.submit([1] * 100, SamplingParams(max_tokens=None))


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, 2**63, "hot")],
        *[("top_p", value) for value in (0, 1.01, None)],
        *[("top_k", value) for value in (-1, 1.5, True)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("seed", value) for value in (1.5, 2**64)],
        *[("repetition_penalty", value) for value in (0, math.inf)],
        *[("presence_penalty", value) for value in (2.1, math.nan)],
        *[("frequency_penalty", value) for value in (10**400, True)],
        *[("logprobs", value) for value in (101, 1.0)],
        *[("max_tokens", value) for value in (0, 2.0, "9")],
        *[("stop", value) for value in (["a", ""], [None], 2.5)],
        *[
            ("logit_bias", value)
            for value in (
                [1],
                {"a": 1},
                {1: math.nan},
                {1: 10**400},
            )
        ],
        ("ignore_eos", 1),
    ],
)
def test_bad_setting_is_refused_by_name(field, value):
    """A bad setting raises in the constructor, with one line that names the field."""
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"stop": [272]}, {"stop": -1}, {"logit_bias": {272: 1.0}}])
def test_token_outside_the_vocabulary_is_refused(parts, settings):
    """A token id outside the vocabulary is refused. In `logit_bias` it crashed mlx-lm's server."""
    with (
        Engine(*parts, slots=1, max_len=64) as engine,
        pytest.raises(ValueError, match=r"(272|-1).*272"),
    ):
        engine.submit([1], SamplingParams(max_tokens=4, **settings))
