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

So one operation does the same step for all rows. A greedy request costs an argmax and nothing else.
For any other the steps are these, in mlx-lm's order:

    mask       tokens that a grammar forbids become minus infinity
    penalize   add logit_bias, apply repetition_penalty, subtract presence and frequency penalty
    spread     how far is each token below the likeliest one? The log probabilities are taken here
    filter     top_k, top_p and min_p, each on the probabilities at temperature 1
    draw       the temperature changes the weights of the tokens that are left, and one is drawn

The filters are simple where a row is sorted (`keep_first`). But a large vocabulary is never sorted:
`kernels/sampling_ops.py` finds the top k, and how far down the filters reach, without it.

The invariant: a request's token depends on the request's own logits, settings, seed and position. The
group depends on the settings alone, and no operation here mixes rows. The noise is a hash of seed and
position, so there is no generator whose state a neighbour could advance.

Where next: `runner.py`, which calls `sample` in every step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kernels.device import has_gpu, mx
from kernels.sampling_ops import (
    BLOCK,
    added,
    column,
    exp_minus,
    fold,
    gather,
    keep_nearest,
    likeliest,
    padded,
)
from sampling_params import SHORT_LIST, SamplingParams
from step_output import StepOutput, TokenLogprob

PENALTY_CONTEXT = 20  # repetition_penalty applies to this many last tokens, prompt included
SORTABLE = 4096  # up to this length, a whole row may be sorted


class SamplingRow(NamedTuple):
    """A row that yields a token in this step, and how its request wants it sampled."""

    slot: int
    sampling: SamplingParams
    seed: int
    index: int  # the token is the request's index-th, from 0
    before: tuple[int, ...] = ()  # with a penalty: the prompt's last tokens, and the answer so far
    mask: bytes | None = None  # one bit per token id, 1 if the grammar allows it; lowest bit first

    @property
    def answer(self) -> tuple[int, ...]:
        return self.before[len(self.before) - self.index :]


def sample(
    logits: mx.array,  # (n, V)
    picks: Sequence[SamplingRow],
    state: SlotState,
) -> tuple[mx.array, list[Logprobs]]:  # (n,)
    """Sample a token for each row, and measure log probabilities where `logprobs` asks for them.

    `logits`: one row for each of `picks`. If a row is not finite, its token is -1.
    """
    groups = defaultdict(list)
    for row, pick in enumerate(picks):
        has_logprobs = pick.sampling.logprobs is not None
        groups[pick.sampling.group, has_logprobs, pick.mask is not None].append(row)

    order = []
    tokens = []
    logprobs = []
    for (group, has_logprobs, has_mask), rows in groups.items():
        members = [picks[row] for row in rows]
        x = logits if len(groups) == 1 else logits[mx.array(rows)]
        unmasked = x
        if has_mask:
            x = x + state.mask([pick.mask for pick in members])
        if group != "greedy":
            x = apply_penalties(x.astype(mx.float32), members, state)
            spread = Spread.of(x)
        if group in ("greedy", "edited"):
            best, ids = argmax(x)
        else:
            best = spread.best
            ids = draw(spread, members, group)
        if has_logprobs:
            free = Spread.of(unmasked.astype(mx.float32)) if has_mask else None
            measured = measure(spread, members, ids, x.shape[-1], free)
            logprobs.append(measured)
        # Comparisons with NaN are False: it could go unnoticed. But the maximum of its row is NaN.
        is_finite = mx.isfinite(best)
        ids = mx.where(is_finite, ids.astype(mx.int32), -1)
        tokens.append(ids)
        order += rows
    tokens = mx.concatenate(tokens)  # (n, 1), in the order of the groups
    if order != sorted(order):
        tokens = tokens[mx.argsort(mx.array(order))]
    return tokens[:, 0], logprobs


class SlotState:
    """State that outlives a step: the bias of each slot's request, and a table that unpacks grammar
    masks."""

    def __init__(self, slots: int, V: int):
        self._no_bias = mx.zeros(V)
        self._biases = [({}, self._no_bias)] * slots  # each with the settings it was built for
        octets = mx.arange(256)[:, None]
        bits = octets >> mx.arange(8) & 1  # (256, 8)
        self._mask_of_byte = mx.where(bits == 1, 0, -math.inf)

    def bias(self, pick: SamplingRow) -> mx.array:  # (V,)
        """logit_bias as array, built once per request: 100,000 entries take longer than a step."""
        wanted = pick.sampling.logit_bias
        if not wanted:
            return self._no_bias
        built_for, bias = self._biases[pick.slot]
        if built_for is not wanted:
            ids = mx.array(list(wanted))
            values = mx.array(list(wanted.values()))
            bias = self._no_bias.at[ids].add(values)
            self._biases[pick.slot] = (wanted, bias)
        return bias

    def mask(self, masks: Sequence[bytes]) -> mx.array:  # (n, V)
        """0 for each token that is allowed, and minus infinity for the others.

        On a CPU, looking up each byte of eight tokens takes MLX a fifth of the time of shifting bits.
        """
        octets = mx.array(memoryview(b"".join(masks)))
        each = self._mask_of_byte[octets].reshape(len(masks), -1)
        return each[:, : len(self._no_bias)]


def apply_penalties(
    x: mx.array,  # (n, V)
    picks: Sequence[SamplingRow],
    state: SlotState,
) -> mx.array:  # (n, V)
    """Add logit_bias, then the penalties for tokens that occurred before."""
    settings = [pick.sampling for pick in picks]
    if any(s.logit_bias for s in settings):
        biases = [state.bias(pick) for pick in picks]
        x = x + mx.stack(biases)
    if any(s.repetition_penalty != 1 for s in settings):
        penalty = column([s.repetition_penalty for s in settings])
        recent = tokens_of([pick.before[-PENALTY_CONTEXT:] for pick in picks], PENALTY_CONTEXT)
        old = gather(x, recent)
        new = mx.where(old < 0, old * penalty, old / penalty)
        x = mx.put_along_axis(x, recent, new, axis=-1)
    if any(s.counts for s in settings):
        answers = [pick.answer for pick in picks]
        counts = [len(answer) for answer in answers]
        width = SHORT_LIST * (1 + max(counts) // SHORT_LIST)  # so that the shapes are few
        tokens = tokens_of(answers, width)  # (n, width)
        is_said = mx.arange(width) < column(counts)
        presence = column([s.presence_penalty for s in settings])
        frequency = column([s.frequency_penalty for s in settings])
        # All entries of a token that occurs several times have the same value: any may be the last
        once = gather(x, tokens) - presence * is_said[:, :1]
        x = mx.put_along_axis(x, tokens, once, axis=-1)
        rows = mx.arange(len(picks))[:, None]
        x = x.at[rows, tokens].add(-frequency * is_said)
    return x


def tokens_of(rows: Sequence[tuple[int, ...]], width: int) -> mx.array:  # (n, width)
    """Token ids as a matrix. A short row repeats its first token to the end."""
    full = []
    for row in rows:
        first = row[:1] or (0,)
        full.append(row + first * (width - len(row)))
    return mx.array(full)


# --- without a filter ---------------------------------------------------------------------------


def argmax(x: mx.array) -> tuple[mx.array, mx.array]:  # (n, V) -> (n, 1) twice
    """The largest number of each row, and its first id.

    The CPU's form finds the first of the best blocks, and then the id within that block. MLX needs
    a third of the time for the maximum of each column, so a block is a small matrix.
    """
    if has_gpu():
        best = x.max(axis=-1, keepdims=True)
        return best, mx.argmax(x, axis=-1, keepdims=True)
    x = padded(x, 128, -math.inf)
    blocks = x.reshape(len(x), -1, 8, 16)
    best = blocks.max(axis=2).max(axis=2)  # (n, blocks)
    first = 128 * mx.argmax(best, axis=-1, keepdims=True)  # (n, 1): where that block begins
    block = gather(x, first + mx.arange(128))
    ids = first + mx.argmax(block, axis=-1, keepdims=True)
    return best.max(axis=-1, keepdims=True), ids


class Spread(NamedTuple):
    """How far the tokens of each row are below the likeliest one.

        probability = e^-gap / total

        token     a      b      c      padding
        logit     2.1    4.0    3.3    -inf
        gap       1.9    0      0.7    inf
        weight    0.15   1      0.50   0          total 1.65

    MLX computes only what is evaluated. If no token needs a probability, weights cost nothing.
    """

    best: mx.array  # (n, 1): the largest logit
    gap: mx.array  # (n, V): how far a logit is below the largest. Here V means whole blocks
    weights: mx.array  # (n, V): e^-gap
    total: mx.array  # (n, 1): the sum of the weights

    @staticmethod
    def of(x: mx.array) -> Spread:
        x = padded(x, BLOCK, -math.inf)
        best = fold(mx.max, x)
        gap = best - x
        weights = exp_minus(gap)
        return Spread(best, gap, weights, total=fold(mx.sum, weights))

    def only(self, ids: mx.array) -> Spread:
        """The same for some tokens of each row: `ids`, gap and weights are (n, k)."""
        gap = gather(self.gap, ids)
        return self._replace(gap=gap, weights=exp_minus(gap))


# --- filters, and the draw ----------------------------------------------------------------------


class Filters(NamedTuple):
    """Where the filters stop, counted from each row's likeliest token down.

    A filter stops after a number of tokens, after a probability mass, or at a gap. Each setting becomes
    one of these three, and the rest of this file handles only these. So a new filter is a few lines
    in `of`.
    """

    count: mx.array  # (n, 1): keep this many tokens
    mass: mx.array | None  # (n, 1): keep tokens until they have this part of the total
    gaps: list[mx.array]  # (n, 1) each: keep tokens up to this gap

    @staticmethod
    def of(spread: Spread, settings: list[SamplingParams]) -> Filters:
        V = spread.gap.shape[-1]
        counts = [min(s.top_k or V, V) for s in settings]
        mass = None
        if any(s.top_p < 1 for s in settings):
            # 1.5 keeps everything. Below 1e-30 a float32 may become 0, which keeps nothing.
            shares = [max(s.top_p, 1e-30) if s.top_p < 1 else 1.5 for s in settings]
            mass = column(shares)
        gaps = []
        if any(s.min_p for s in settings):
            gaps.append(gap_of([s.min_p for s in settings]))
        return Filters(column(counts), mass, gaps)


def gap_of(fractions: list[float]) -> mx.array:  # (n, 1)
    """The gap of a token that is this fraction as likely as the likeliest one."""
    gaps = []
    for fraction in fractions:
        gaps.append(-math.log(fraction) if fraction else math.inf)
    return column(gaps)


def draw(
    spread: Spread,
    picks: Sequence[SamplingRow],
    group: str,
) -> mx.array:  # (n, 1)
    """Give each token a weight, 0 if it is filtered out, and draw one by `inverse_cdf`."""
    settings = [pick.sampling for pick in picks]
    filters = Filters.of(spread, settings)
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

    noise = [uniform(pick.seed, pick.index) for pick in picks]
    places = inverse_cdf(weights, column(noise))
    return places if ids is None else gather(ids, places)


def keep_first(spread: Spread, filters: Filters) -> mx.array:  # (n, k) bool
    """The tokens that count and mass keep, where the tokens are sorted.

        probability    0.4   0.3   0.2   0.06    top_k = 3 keeps three
        above          0     0.4   0.7   0.9     top_p = 0.6 keeps two

    The mass keeps a token if the tokens above have less than top_p together.
    """
    keep = mx.arange(spread.gap.shape[-1]) < filters.count
    if filters.mass is not None:
        above = mx.cumsum(spread.weights, axis=-1, inclusive=False)
        keep = keep & (above < filters.mass * spread.total)
    return keep


def inverse_cdf(
    weights: mx.array,  # (n, V)
    u: mx.array,  # (n, 1)
) -> mx.array:  # (n, 1)
    """Draw from a distribution: the index where the running sum of the weights passes u times their sum.

        weights    | 0.5    | 0.3    | 0.2 |      u = 0.6 draws the second
        sums       0        0.5      0.8   1

    One running sum over V float32 numbers would lose the small ones. So blocks are added up, then
    blocks of blocks. The index is found from the top: the large block, the block in it, the index.
    """
    levels = [weights]
    while levels[-1].shape[-1] > BLOCK:
        blocks = levels[-1].reshape(len(weights), -1, BLOCK)
        sums = blocks.sum(axis=-1)
        levels.append(padded(sums, BLOCK, 0))
    mark = u * added(levels[-1])
    place = mx.zeros(u.shape, mx.int32)
    for level in reversed(levels):
        first = place * BLOCK
        block = gather(level, first + mx.arange(BLOCK))  # (n, BLOCK)
        sums = mx.cumsum(block, axis=-1)
        # Rounding may put the mark at an end of the block, where a token may have been filtered.
        end = sums[:, -1:] * (1 - 2**-22)
        mark = mx.clip(mark, 0, end)
        inside = mx.minimum(added(sums <= mark), BLOCK - 1)
        mark = mark - gather(sums - block, inside)
        place = first + inside
    return place


def uniform(seed: int, index: int) -> float:
    """The index-th number of a seed's own sequence, above 0 and below 1: a hash, without a state.

    The number has 22 bits, so that u times a float32 sum is always below the sum.
    """
    x = seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03
    x = (x + 0x8CB92BA72F3D8DD7) % 2**64
    for _ in range(2):  # splitmix64's finisher: each input bit reaches each output bit
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        x ^= x >> 31
    return ((x >> 42) + 0.5) / 2**22


# --- log probabilities --------------------------------------------------------------------------


class Logprobs(NamedTuple):
    """Log probabilities for some rows, still on the device: the chosen token's, then the top ones,
    then those that would be the top without the grammar, if there is one."""

    picks: Sequence[SamplingRow]
    most: int  # of the top
    ids: mx.array  # (n, 1 + most), or (n, 1 + 2 most) with a grammar
    values: mx.array  # of the same shape

    def read(self) -> Iterator[tuple[SamplingRow, StepOutput]]:
        """Each row with its token and the log probabilities."""
        all_ids = self.ids.tolist()
        all_values = self.values.tolist()
        for pick, ids, values in zip(self.picks, all_ids, all_values, strict=True):
            (token, logprob), *pairs = zip(ids, values, strict=True)
            top = tuple(pairs[: self.most])
            free = tuple(pairs[self.most :])
            yield pick, StepOutput(token, TokenLogprob(logprob, top, free))


def measure(
    spread: Spread,
    picks: Sequence[SamplingRow],
    ids: mx.array,  # (n, 1)
    V: int,
    free: Spread | None,  # without the grammar
) -> Logprobs:
    """log(e^-gap / total) for the chosen tokens and the likeliest ones, before any filter."""
    most = min(max(pick.sampling.logprobs for pick in picks), V)
    if most:
        top = likeliest(spread.gap, most)
        ids = mx.concatenate([ids, top], axis=-1)
    values = -gather(spread.gap, ids) - mx.log(spread.total)
    if most and free is not None:
        top = likeliest(free.gap, most)
        ids = mx.concatenate([ids, top], axis=-1)
        unmasked = -gather(free.gap, top) - mx.log(free.total)
        values = mx.concatenate([values, unmasked], axis=-1)
    return Logprobs(picks, most, ids, values)
