"""Chapter 4: how each row of a batch gets its own sampling parameters, without a loop.

The problem. A forward pass ends with a row of V logits for each request. One request is greedy,
another has a temperature of 0.8 and a seed, and a third must never say a certain word. A loop over
the requests would run many small operations for each of them, one request after the other. One
sampler for all would give seven requests the settings of the eighth.

The solution. Requests that need the same work form a *sampling group*. The logits of a
group are a matrix with a row for each request. Each setting is a column next to it.

              logits (n, V)           temperature (n, 1)    u (n, 1)
    A         2.1   4.0   3.3  ...    0.8                   0.31
    B         0.4   0.2   5.1  ...    1.3                   0.77

So one operation does the same step for all rows. "greedy" takes an argmax, "edited" an argmax after a bias or
penalties, or for log probabilities. The others draw, in mlx-lm's steps: "short list" for a top_k up to
SHORT_LIST, "long list" for a larger one or a top_p, and "open" for neither (`SamplingParams.group`).

    mask       tokens that a grammar forbids become minus infinity
    penalize   add logit_bias, apply repetition_penalty, subtract presence and frequency penalty
    spread     how far is each token below the likeliest one? The log probabilities are taken here
    filter     top_k, top_p and min_p, each on the probabilities at temperature 1
    draw       the temperature changes the weights of the tokens that are left, and one is drawn

The filters are defined on sorted tokens (`keep_first`). A large vocabulary is never sorted: there, bisection
keeps the same tokens (`kernels/sampling_ops.py`).

The invariant: a request's token depends on its own logits, settings, seed and position. No operation mixes rows.

Where next: `token_choice.py`, then `runner.py`, which calls `sample` in every step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kernels.device import mx
from kernels.sampling_ops import (
    BLOCK,
    column,
    exp_minus,
    filled,
    fold,
    gather,
    keep_nearest,
    likeliest,
    padded,
)
from kernels.slot_biases import SlotBiases
from logprobs import Logprobs, measure
from sampling_params import SHORT_LIST, SamplingParams
from token_choice import argmax, inverse_cdf, uniform

PENALTY_CONTEXT = 20  # repetition_penalty looks at this many of the newest tokens, prompt included
SORTABLE = 4096  # up to this length, a whole row may be sorted


class SamplingRow(NamedTuple):
    """A row that yields a token in this step, and how its request wants it sampled."""

    slot: int
    sampling: SamplingParams
    seed: int
    index: int  # the token's index in the answer, from 0
    before: tuple[int, ...] = ()  # with a penalty: the end of the prompt, and the answer so far
    mask: bytes | None = None  # one bit per token id, 1 if the grammar allows it; lowest bit first

    @property
    def answer(self) -> tuple[int, ...]:
        return self.before[len(self.before) - self.index :]


def sample(
    logits: mx.array, picks: Sequence[SamplingRow], biases: SlotBiases
) -> tuple[mx.array, list[Logprobs]]:  # (n, V) -> (n,)
    """Sample a token for each row, and measure log probabilities where `logprobs` asks for them.

    `logits`: one row for each of `picks`. If a row is not finite, its token is -1.
    """
    groups = defaultdict(list)
    for place, pick in enumerate(picks):
        has_logprobs = pick.sampling.logprobs is not None
        groups[pick.sampling.group, has_logprobs, pick.mask is not None].append(place)

    order = []
    tokens = []
    logprobs = []
    for (group, has_logprobs, has_mask), places in groups.items():
        members = [picks[place] for place in places]
        x = logits if len(groups) == 1 else logits[mx.array(places)]
        unmasked = x  # also without bias and penalties
        if has_mask:
            x = x + biases.mask([pick.mask for pick in members])
        if group != "greedy":
            x = apply_penalties(x.astype(mx.float32), members, biases)
            spread = Spread.from_logits(x)
        if group in ("greedy", "edited"):
            best, ids = argmax(x)
        else:
            best = spread.best
            ids = draw(spread, members, group)
        if has_logprobs:
            free = Spread.from_logits(unmasked.astype(mx.float32)) if has_mask else None
            logprobs.append(measure(spread, members, ids, x.shape[-1], free))  # never "greedy"
        # Comparisons with NaN are False, so a NaN could go unnoticed. But it makes the maximum NaN.
        tokens.append(mx.where(mx.isfinite(best), ids.astype(mx.int32), -1))
        order += places
    tokens = mx.concatenate(tokens)  # (n, 1), in the order of the groups
    if order != sorted(order):
        tokens = tokens[mx.argsort(mx.array(order))]
    return tokens[:, 0], logprobs


def apply_penalties(
    x: mx.array, picks: Sequence[SamplingRow], biases: SlotBiases
) -> mx.array:  # (n, V) -> (n, V)
    """Add logit_bias, then the penalties for tokens that occurred before."""
    settings = [pick.sampling for pick in picks]
    if any(s.logit_bias for s in settings):
        x = x + mx.stack([biases.bias(pick.slot, pick.sampling.logit_bias) for pick in picks])
    if any(s.repetition_penalty != 1 for s in settings):
        penalty = column([s.repetition_penalty for s in settings])
        # `filled` pads a row with its first token. A repeated token gets the same value each time
        recent = filled([pick.before[-PENALTY_CONTEXT:] for pick in picks], PENALTY_CONTEXT)
        old = gather(x, recent)
        new = mx.where(old < 0, old * penalty, old / penalty)
        x = mx.put_along_axis(x, recent, new, axis=-1)
    if any(s.counts for s in settings):
        answers = [pick.answer for pick in picks]
        counts = [len(answer) for answer in answers]
        width = SHORT_LIST * (1 + max(counts) // SHORT_LIST)  # to keep the number of shapes small
        tokens = filled(answers, width)  # (n, width)
        is_said = mx.arange(width) < column(counts)
        presence = column([s.presence_penalty for s in settings])
        once = gather(x, tokens) - presence * is_said[:, :1]
        x = mx.put_along_axis(x, tokens, once, axis=-1)
        frequency = column([s.frequency_penalty for s in settings])
        x = x.at[mx.arange(len(picks))[:, None], tokens].add(-frequency * is_said)
    return x


class Spread(NamedTuple):
    """How far each token's logit is below the row's largest, and the weights that follow.

        probability = e^-gap / total

        token     a      b      c      padding
        logit     2.1    4.0    3.3    -inf
        gap       1.9    0      0.7    inf
        weight    0.15   1      0.50   0          total 1.65

    MLX computes only what is used: if no token needs a probability, the weights cost nothing.
    """

    best: mx.array  # (n, 1): the largest logit
    gap: mx.array  # (n, V): distance from the largest logit, with V padded to whole blocks
    weights: mx.array  # (n, V): e^-gap
    total: mx.array  # (n, 1): the sum of the weights

    @staticmethod
    def from_logits(x: mx.array) -> Spread:
        x = padded(x, BLOCK, -math.inf)
        best = fold(mx.max, x)
        gap = best - x
        weights = exp_minus(gap)
        return Spread(best, gap, weights, total=fold(mx.sum, weights))

    def only(self, ids: mx.array) -> Spread:
        """Keep some tokens of each row: `ids`, and the gap and weights of the result, are (n, k)."""
        gap = gather(self.gap, ids)
        return self._replace(gap=gap, weights=exp_minus(gap))


class Filters(NamedTuple):
    """The points where the filters stop, from each row's likeliest token down.

    A filter stops after a number of tokens, after a probability mass, or at a gap. Each setting is turned
    into one of these three, so a new filter takes a few lines in `from_settings`.
    """

    count: mx.array  # (n, 1): keep this many tokens
    mass: mx.array | None  # (n, 1): keep tokens until they have this part of the total
    gaps: list[mx.array]  # (n, 1) each: keep tokens up to this gap

    @staticmethod
    def from_settings(settings: list[SamplingParams], spread: Spread) -> Filters:
        V = spread.gap.shape[-1]
        counts = [min(s.top_k or V, V) for s in settings]
        mass = None
        if any(s.top_p < 1 for s in settings):
            # 1.5 keeps every token. Below 1e-30 a float32 may become 0, which would keep none.
            mass = column([max(s.top_p, 1e-30) if s.top_p < 1 else 1.5 for s in settings])
        gaps = []
        if any(s.min_p for s in settings):
            gaps.append(column([gap_at(s.min_p) for s in settings]))
        return Filters(column(counts), mass, gaps)


def gap_at(fraction: float) -> float:
    """The gap of a token that is this fraction as likely as the likeliest one."""
    return -math.log(fraction) if fraction else math.inf


def draw(spread: Spread, picks: Sequence[SamplingRow], group: str) -> mx.array:  # (n, 1)
    """Give each token a weight, 0 if it is filtered out, and draw one by `inverse_cdf`."""
    settings = [pick.sampling for pick in picks]
    filters = Filters.from_settings(settings, spread)
    V = spread.gap.shape[-1]
    ids = None
    if group == "short list":
        ids = likeliest(spread.gap, SHORT_LIST)
    elif group == "long list" and V <= SORTABLE:
        ids = likeliest(spread.gap, V)
    if ids is not None:
        spread = spread.only(ids)

    weights = spread.weights
    if any(s.temperature != 1 for s in settings):
        temperature = column([max(s.temperature, 1e-6) for s in settings])
        weights = exp_minus(spread.gap / temperature)
    if ids is not None:
        weights = weights * keep_first(spread, filters)
    elif group == "long list":
        weights = weights * keep_nearest(
            spread.gap, spread.weights, spread.total, filters.count, filters.mass
        )
    for gap in filters.gaps:
        weights = weights * (spread.gap <= gap)

    u = column([uniform(pick.seed, pick.index) for pick in picks])
    places = inverse_cdf(weights, u)
    return places if ids is None else gather(ids, places)


def keep_first(spread: Spread, filters: Filters) -> mx.array:  # (n, k) bool
    """True for the tokens that count and mass keep, in sorted rows.

        probability    0.4   0.3   0.2   0.06    top_k = 3 keeps three
        above          0     0.4   0.7   0.9     top_p = 0.6 keeps two

    The mass keeps a token if the tokens above it add up to less than top_p.
    """
    keep = mx.arange(spread.gap.shape[-1]) < filters.count
    if filters.mass is not None:
        above = mx.cumsum(spread.weights, axis=-1, inclusive=False)
        keep = keep & (above < filters.mass * spread.total)
    return keep
