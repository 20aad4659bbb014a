"""Exercise 2: a sampler.

    python -m pytest -x course/exercises/test_2_sampler.py

The task. `min_p` keeps the tokens that are at least a fraction m as likely as the likeliest one.
That works well if the model is sure; if it is not, too few tokens are kept. `top_a` keeps the
tokens whose probability is at least

    a x p x p        p is the probability of the likeliest token, at temperature 1

So if the model is sure (p near 1), it keeps the same tokens as `min_p`, and if it is not, many
more. Give every request a `SamplingParams(top_a=0.3)`; 0 keeps all tokens. With a = 0.3:

    probability   0.50   0.30   0.10   0.06   0.04
    a x p x p     0.075                               keeps three

Read first: the essay at the top of `sampling.py`, then `Spread` and `Filters`. A token's
probability is e^-gap / total, so the likeliest token has the probability 1 / total. What is the
largest gap that `top_a` keeps? It depends on `total`.

Where: a field of `SamplingParams` and its limits (0 to 1) in `LIMITS`, both in
`sampling_params.py`; one more gap in `Filters.from_settings` in `sampling.py`, next to that of
`min_p`; an option `--top-a` in `ask.py`; and its name in `PLAIN` of `server/openai.py`, so that
HTTP clients can send it.

How to check: run the command above and `python -m pytest tests/core/test_sampling.py`.
"""

import json
import math
from dataclasses import fields

import pytest
from short_failures import not_done

import ask
import sampling
from kernels.device import mx
from sampling import SamplingRow, SlotBiases, sample
from sampling_params import SamplingParams
from server.body_reader import APIError, read_json
from server.openai import parse_request

PROBABILITIES = (0.50, 0.30, 0.10, 0.06, 0.04)
DRAWS = 1_000
MESSAGE = {"role": "user", "content": "Why?"}


def drawn(**options) -> set[int]:
    """Return the tokens of 1,000 draws, which are enough to draw a token of 4 %."""
    if "top_a" not in {field.name for field in fields(SamplingParams)}:
        not_done("sampling_params.py: SamplingParams has no field top_a")
    logits = mx.log(mx.array([*PROBABILITIES, *[1e-30] * 251]))
    picks = [
        SamplingRow(slot, SamplingParams(**options), seed=5, index=slot) for slot in range(DRAWS)
    ]
    logits = mx.broadcast_to(logits, (DRAWS, 256))
    return set(sample(logits, picks, SlotBiases(DRAWS, 256))[0].tolist())


@pytest.mark.parametrize("a, kept", [(0.0, 5), (0.2, 4), (0.3, 3), (0.5, 2), (1.0, 2)])
def test_top_a_keeps_what_its_definition_keeps(a, kept):
    """The thresholds a x p x p are 0, 0.05, 0.075, 0.125 and 0.25."""
    assert drawn(temperature=1.0, top_a=a) == set(range(kept))


def test_top_a_looks_at_probabilities_at_temperature_1():
    assert drawn(temperature=3.0, top_a=0.3) == {0, 1, 2}


@pytest.mark.parametrize(
    "other", [{"top_k": 2}, {"top_k": 4}, {"top_k": 200}, {"top_p": 0.75}, {"top_p": 0.99}]
)
@pytest.mark.parametrize("how", ["sorted", "bisected"])
def test_top_a_works_beside_the_other_filters(other, how, monkeypatch):
    """The filters take different branches of `draw`: a short list, a long list that is sorted, and
    one that is bisected."""
    monkeypatch.setattr(sampling, "SORTABLE", sampling.SORTABLE if how == "sorted" else 0)
    others = min(other.get("top_k", 5), 2 if other.get("top_p") == 0.75 else 5)
    assert drawn(temperature=1.0, top_a=0.3, **other) == set(range(min(3, others)))


def test_a_neighbour_with_min_p_or_none_gets_its_own_filter():
    """Requests in a group keep their own settings, which are stored in columns."""
    drawn(top_a=0.3)
    settings = [{"top_a": 0.3}, {"min_p": 0.5}, {}, {"top_a": 0.3, "min_p": 0.5}]
    logits = mx.broadcast_to(mx.log(mx.array([*PROBABILITIES, *[1e-30] * 251])), (DRAWS, 256))
    picks = [
        SamplingRow(i, SamplingParams(temperature=1.0, **settings[i % 4]), seed=5, index=i)
        for i in range(DRAWS)
    ]
    tokens = sample(logits, picks, SlotBiases(DRAWS, 256))[0].tolist()
    assert [set(tokens[i::4]) for i in range(4)] == [set(range(n)) for n in (3, 2, 5, 2)]


def test_top_a_is_checked_and_is_an_option_of_the_command_line():
    drawn(top_a=0.3)
    for wrong in (-0.1, 1.1, math.nan):
        try:
            SamplingParams(top_a=wrong)
        except ValueError:
            continue
        not_done(f"SamplingParams(top_a={wrong}) is not refused: top_a has no limits in LIMITS")
    try:
        args = ask.parse_arguments(["--top-a", "0.3", "Why?"])
    except SystemExit:
        not_done("ask.py has no option --top-a")
    assert args.top_a == 0.3


def test_a_client_may_ask_for_top_a_over_http():
    """A client can send `top_a` in the body of a request, in both of OpenAI's forms."""
    drawn(top_a=0.3)
    for body, is_chat in (({"prompt": "Why?"}, False), ({"messages": [MESSAGE]}, True)):
        body = json.dumps({"model": "demo", "top_a": 0.3, **body})
        try:
            wish = parse_request(read_json(body.encode()), is_chat)
        except APIError as refusal:
            not_done(f"server/openai.py refuses top_a ({refusal}): is its name in PLAIN?")
        assert wish.settings["top_a"] == 0.3
