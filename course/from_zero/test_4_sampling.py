"""Stage 4: sampling. You write `argmax`, `uniform` and `inverse_cdf` in token_choice.py, and `keep_first` and
`draw` in sampling.py.
"""

import math
from collections.abc import Sequence
from itertools import chain, pairwise

import pytest

import sampling
import token_choice
from course.from_zero.shared_by_tests import assert_close, ids_of, logits, new_slab, text_of
from course.from_zero.small_llama import V, answer
from kernels.device import mx
from nanobatch import SamplingParams
from sampling import SamplingRow


def assert_same(found: Sequence[float], wanted: Sequence[float], when: str) -> None:
    """Assert that two long lists are equal. Report only the number of differences.

    pytest's own diff, which `-v` and CI enable, would take hours.
    """
    differing = sum(a != b for a, b in zip(found, wanted, strict=True))
    assert differing == 0, f"{when}, {differing} of {len(wanted)} numbers differ"


@pytest.mark.about("argmax")
def test_argmax():
    """The best of a row is its largest number; among equal numbers, the first."""
    best, ids = token_choice.argmax(
        mx.array([[1.0, 3.0, 2.0], [0.0, 9.0, 9.0], [-1.0, -2.0, -1.5]])
    )
    assert_close(best, mx.array([[3.0], [9.0], [-1.0]]), "the best")
    assert ids.tolist() == [[1], [1], [0]]


@pytest.mark.about("argmax")
def test_argmax_of_nan():
    """The best of a row with a NaN is not finite, because otherwise the fault would stay hidden."""
    best, _ = token_choice.argmax(mx.array([[1.0, math.nan, 2.0]]))
    assert not mx.isfinite(best).item()


@pytest.mark.about("uniform")
def test_noise_depends_on_seed_and_index():
    """Noise depends only on seed and index. It is between 0 and 1."""
    first = [token_choice.uniform(seed, index) for seed in range(64) for index in range(64)]
    again = [token_choice.uniform(seed, index) for seed in range(64) for index in range(64)]
    assert_same(again, first, "asked again")
    values = mx.array(first)
    smallest, largest = values.min().item(), values.max().item()
    assert smallest > 0 and largest < 1, f"as float32, from {smallest} to {largest}"
    highest_bit = 2**63
    assert token_choice.uniform(5 + highest_bit, 9) != token_choice.uniform(5, 9)
    assert token_choice.uniform(-1, 9) != token_choice.uniform(1, 9)
    assert token_choice.uniform(1, 23) != token_choice.uniform(12, 3)
    assert len({token_choice.uniform(5, index) for index in (9, 9 + 64, 9 + 2**16)}) == 3


@pytest.mark.about("uniform")
def test_noise_is_even():
    """Noise is spread evenly over eight parts of 0 to 1, and so are its differences from one index
    to the next and from one seed to the next."""
    rows = [[token_choice.uniform(seed, index) for index in range(64)] for seed in range(64)]
    values = [*chain(*rows)]
    indices = [(b - a) % 1 for a, b in pairwise(values)]
    seeds = [(b[3] - a[3]) % 1 for a, b in pairwise(rows)]
    for what, some in (("numbers", values), ("indices", indices), ("seeds", seeds)):
        counts = [sum(int(8 * value) == part for value in some) for part in range(8)]
        mean = len(some) / 8
        chi_square = sum((count - mean) ** 2 / mean for count in counts)
        assert chi_square < 35, f"{what}: the eight parts have {counts}"  # by chance: 1 in 100,000


@pytest.mark.about("inverse_cdf")
def test_land():
    """A mark selects the weight at which the running sum passes it, never a weight of 0."""
    weights = mx.array([[0.0, 5.0, 0.0, 3.0, 2.0, *[0.0] * 59]])  # a multiple of the block size
    marks = {0.0: 1, 0.3: 1, 0.499: 1, 0.501: 3, 0.6: 3, 0.799: 3, 0.801: 4, 0.9999999: 4, 1.0: 4}
    assert {u: token_choice.inverse_cdf(weights, mx.array([[u]])).item() for u in marks} == marks
    many = mx.zeros((2, 5120))
    many[0, 4321] = 1.0
    many[1, 17] = many[1, 4000] = 1.0
    assert token_choice.inverse_cdf(many, mx.array([[0.5], [0.75]])).tolist() == [[4321], [4000]]


IDS = (42, 7, 250, 3, 199)  # the likely tokens
PROBABILITIES = (0.4, 0.3, 0.2, 0.06, 0.04)


def logits_of(rows: int) -> mx.array:
    probabilities = [1e-30] * 300
    for token, probability in zip(IDS, PROBABILITIES, strict=True):
        probabilities[token] = probability
    return mx.broadcast_to(mx.log(mx.array(probabilities)), (rows, 300))


@pytest.mark.about("keep_first")
def test_keep_first():
    """top_k keeps a number of tokens, top_p a share of the probability."""

    def kept(*settings: dict, ids: Sequence[int] = IDS) -> list[int]:
        """Return how many of these tokens are kept in each row."""
        spread = sampling.Spread.from_logits(logits_of(len(settings)))
        spread = spread.only(mx.broadcast_to(mx.array(ids), (len(settings), len(ids))))
        filters = sampling.Filters.from_settings(
            [SamplingParams(**each) for each in settings], spread
        )
        keep = sampling.keep_first(spread, filters).tolist()
        assert all(row == sorted(row, reverse=True) for row in keep), "the likeliest are kept"
        return [sum(row) for row in keep]

    assert kept({"top_k": 3}, {"top_p": 0.6}) == [3, 2]
    assert kept({"top_k": 1, "top_p": 0.99}, {"top_p": 0.01}) == [1, 1]
    assert kept({"top_k": 2}, {"top_k": 4}) == [2, 4]
    assert kept({"top_p": 0.42}, ids=IDS[:3]) == [2], (
        "a part of all probability, not of these three"
    )


DRAWS = 4_000


def draws(*settings: dict, slots: Sequence[int] = range(DRAWS)) -> list[int]:
    """Return the tokens of 4,000 rows, which use the settings in turn. 0 is the likeliest token.
    Each row has its own seed and index."""
    picks = []
    for row, slot in enumerate(slots):
        options = SamplingParams(**settings[row % len(settings)])
        picks.append(SamplingRow(slot, options, seed=row % 50, index=row // 50))
    state = sampling.SlotBiases(DRAWS, 300)
    tokens = sampling.sample(logits_of(DRAWS), picks, state)[0].tolist()
    assert {*tokens} <= {*IDS}, "a token came that is not likely"
    return [IDS.index(token) for token in tokens]


def assert_likely(tokens: Sequence[int], probabilities: Sequence[float]) -> None:
    for token, probability in enumerate(probabilities):
        found = tokens.count(token) / len(tokens)
        assert abs(found - probability) < 0.001 + 5 * math.sqrt(probability / len(tokens)), (
            f"token {token} came in {found:.1%} of the draws, expected {probability:.1%}"
        )


@pytest.mark.about("draw")
def test_temperature():
    """At each temperature, tokens are drawn as often as they are likely."""
    both = draws({"temperature": 1.0}, {"temperature": 2.0})
    assert_likely(both[0::2], PROBABILITIES)
    roots = [math.sqrt(p) for p in PROBABILITIES]
    assert_likely(both[1::2], [root / sum(roots) for root in roots])


@pytest.mark.about("draw")
def test_filters():
    """Each row has its own filters, which are applied at temperature 1."""
    each = (
        {"temperature": 2.0, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "min_p": 0.3},
        {"temperature": 1.0, "min_p": 0.6, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.6, "top_p": 0.99},
    )
    tokens = draws(*each)
    for row, likely in enumerate(({0, 1}, {0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1})):
        assert {*tokens[row::5]} == likely, each[row]
    assert_likely(tokens[1::5], [p / 0.9 for p in (0.4, 0.3, 0.2)])
    picks = [SamplingRow(0, SamplingParams(temperature=1, top_k=100), 0, i) for i in range(DRAWS)]
    alike, _ = sampling.sample(mx.zeros((DRAWS, 300)), picks, sampling.SlotBiases(1, 300))
    assert {*alike.tolist()} == {*range(100)}, "top_k = 100"


@pytest.mark.about("draw")
def test_draws_do_not_depend_on_the_company():
    """A draw depends on seed and index, but not on slot or neighbours."""
    warm = {"temperature": 1.0}
    alone = draws(warm)
    assert_same(draws(warm), alone, "drawn again")
    assert_same(draws(warm, slots=[*reversed(range(DRAWS))]), alone, "in other slots")
    company = draws(warm, {"temperature": 1.0, "top_k": 1}, {}, {"min_p": 0.3})
    assert_same(company[0::4], alone[0::4], "next to others' settings")
    assert {*company[1::4]} == {0}, "top_k = 1"


def test_seeds():
    """With your sampler, the same seed gives the same answer."""
    state = sampling.SlotBiases(1, V)
    warm = SamplingParams(temperature=0.9, top_p=0.95)

    def story(seed: int) -> list[int]:
        slab = new_slab()

        def step(ids: Sequence[int], windows: Sequence) -> mx.array:
            start = windows[0].starts[0]
            row = SamplingRow(0, warm, seed, start)
            token, _ = sampling.sample(logits(ids, slab, start)[-1:], [row], state)
            return mx.where(mx.arange(V) == token, 1.0, 0.0)[None]  # argmax gives this token

        return answer(ids_of("Tell me a story about a fox."), step)

    first, same, different = [story(seed) for seed in (7, 7, 8)]
    assert same == first
    assert different != first
    print(f"seed 7: {text_of(first)!r}, twice")
