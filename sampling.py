"""How a request's tokens are chosen from the logits.

The problem. The requests in one batch want different things. One is greedy, another wants temperature 0.8 and a seed, a
third must never say a certain word. Running a sampler for each request would cost a device round trip per request, and
sharing one sampler would give seven requests what the eighth asked for.

So the requests of a step are sorted into groups by the *kind* of work they need. Each group is chosen in one go: its
logits are a matrix with a row for each request, and every setting is a column of numbers beside it. A greedy request
costs an argmax and nothing else.

The invariant: the token that a request gets depends on its own logits, settings, seed and position. Its group depends
on its own settings alone, and no operation here mixes rows. The noise is one number per token, a hash of (seed,
position), so there is no generator whose state a neighbour could advance.

The order is mlx-lm's. First come logit_bias and repetition_penalty, and then logprobs are taken. Next come top_p, min_p
and top_k, each on the probabilities at temperature 1. The temperature comes last, and acts on the tokens that are left.

Eight rows of a vocabulary of 152,000 are 1.2 million numbers, and to sort them takes ten times as long as the whole
forward pass of a small model. So a large vocabulary is never sorted. `likeliest` finds a few tokens by way of blocks,
and `keep_nearest` finds by bisection how far down a filter reaches. Both do so on the device, in shapes that are known
beforehand: no result is read inside a step, and the engine can start the next one.

Before this: `parts/api/settings.py`, what a request may ask for. Where next: `nanobatch.py`, which calls `choose` in
every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from parts.api.settings import SHORT_LIST, Sampling
from parts.device import mlx as device
from parts.device.mlx import mx

PENALTY_CONTEXT = 20  # repetition_penalty looks at this many of the last tokens, whether of the prompt or of the answer
SORTABLE = 4096  # for a larger one, or for top_p alone, a whole vocabulary up to this size is; of a larger one, nothing
DOWN, ACROSS = 8, 16  # a block of `argmax`
BLOCK = 64  # logits are padded to a multiple of this, so that they fall into blocks


class Pick(NamedTuple):
    """A slot whose sequence gets a token in this step, and what its request asks for."""

    slot: int
    sampling: Sampling
    seed: int
    index: int  # this will be the request's index-th token, from 0
    recent: tuple[int, ...] = ()  # the prompt's last PENALTY_CONTEXT tokens, if index is 0 and a penalty is wanted


class Logprobs(NamedTuple):
    """Log probabilities for some slots, still on the device."""

    slots: list[int]
    chosen: mx.array  # (n,)
    top_ids: mx.array  # (n, most), the most likely first
    top: mx.array  # (n, most)

    def read(self) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...]]]:
        """Slot by slot: the chosen token's log probability, and the most likely tokens with theirs."""
        rows = zip(self.slots, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        for slot, chosen, ids, values in rows:
            yield slot, chosen, tuple(zip(ids, values, strict=True))


class Memory:
    """What the device remembers of each slot from step to step: its recent tokens, and its request's logit_bias."""

    def __init__(self, slots: int, V: int):
        self.V = V
        # (slots, 20): the newest tokens of those whose repetitions are penalised; V stands for none
        self.recent = mx.full((slots, PENALTY_CONTEXT), V, mx.int32)
        self._no_bias = mx.zeros(V)
        self._biases: dict[int, tuple[Sampling, mx.array]] = {}  # by slot, for whose pick it was made

    def begin(self, picks: Sequence[Pick]) -> None:
        """Before tokens are chosen: remember the ends of prompts, and forget the biases of requests that have ended."""
        for pick in picks:
            if pick.recent:
                none = [self.V] * (PENALTY_CONTEXT - len(pick.recent))
                self.recent[pick.slot] = mx.array([*none, *pick.recent])
            if pick.slot in self._biases and self._biases[pick.slot][0] is not pick.sampling:
                del self._biases[pick.slot]

    def bias(self, pick: Pick) -> mx.array:  # (V,)
        """logit_bias for each token. It is built once a request, since 100,000 entries take longer than a step."""
        if not pick.sampling.logit_bias:
            return self._no_bias
        if pick.slot not in self._biases:
            tokens, values = map(list, (pick.sampling.logit_bias.keys(), pick.sampling.logit_bias.values()))
            bias = mx.zeros(self.V).at[mx.array(tokens)].add(mx.array(values, dtype=mx.float32))
            self._biases[pick.slot] = pick.sampling, bias
        return self._biases[pick.slot][1]

    def add(self, picks: Sequence[Pick], tokens: mx.array) -> None:
        """After tokens have been chosen: those whose repetitions are penalised become recent ones."""
        penalised = [i for i, pick in enumerate(picks) if pick.sampling.repetition_penalty != 1]
        if penalised:
            slots = mx.array([picks[i].slot for i in penalised])
            newest = mx.maximum(tokens[mx.array(penalised)], 0)[:, None]
            self.recent[slots] = mx.concatenate([self.recent[slots][:, 1:], newest], axis=1)


def choose(logits: mx.array, picks: Sequence[Pick], memory: Memory) -> tuple[mx.array, list[Logprobs]]:
    """A token for each pick: logits (picks, V) -> (picks,) int32, -1 where the logits were not finite."""
    memory.begin(picks)
    groups: dict[tuple[str, bool], list[int]] = {}
    for place, pick in enumerate(picks):
        groups.setdefault((pick.sampling.group, pick.sampling.logprobs is not None), []).append(place)
    tokens, order, logprobs = [], [], []
    for (group, is_measured), places in groups.items():
        members = [picks[place] for place in places]
        own = logits if len(places) == len(picks) else logits[mx.array(places)]
        if group == "greedy":
            best, chosen = argmax(own)
        else:
            x = edit(own.astype(mx.float32), members, memory)  # (n, V)
            best, spread = Spread.of(x)
            chosen = mx.argmin(spread.gap, axis=-1) if group == "edited" else draw(spread, members, group)
            logprobs += [measure(spread, members, chosen, x.shape[-1])] if is_measured else []
        # NaN passes a comparison in silence. As the maximum, it shows.
        tokens.append(mx.where(mx.isfinite(best), chosen.astype(mx.int32), -1))
        order += places
    together = mx.concatenate(tokens)
    if order != sorted(order):
        together = together[mx.array([order.index(place) for place in range(len(picks))])]
    memory.add(picks, together)
    return together, logprobs


def argmax(x: mx.array) -> tuple[mx.array, mx.array]:  # (n, V) -> the largest of each row (n,), and its place (n,)
    """The first of the largest numbers.

    The tuned form looks for the first of the best blocks, and then within that block. On a CPU, MLX takes a third of
    the time for the largest number of each column than for those of rows, so a block is a small matrix.
    """
    n, V = x.shape
    if device.has_gpu() or V % (ACROSS * DOWN):
        place = mx.argmax(x, axis=-1)
        return mx.take_along_axis(x, place[:, None], axis=-1)[:, 0], place
    blocks = x.reshape(n, -1, DOWN, ACROSS)
    best = blocks.max(axis=2).max(axis=2)  # (n, blocks)
    block = mx.argmax(best, axis=-1)[:, None]
    within = mx.take_along_axis(blocks.flatten(2), block[:, :, None], axis=1)[:, 0]  # (n, DOWN * ACROSS)
    return best.max(axis=-1), block[:, 0] * (DOWN * ACROSS) + mx.argmax(within, axis=-1)


def edit(x: mx.array, picks: list[Pick], memory: Memory) -> mx.array:  # (n, V) -> (n, V)
    """logit_bias, then repetition_penalty."""
    if any(pick.sampling.logit_bias for pick in picks):
        x = x + mx.stack([memory.bias(pick) for pick in picks])
    if any(pick.sampling.repetition_penalty != 1 for pick in picks):
        recent = memory.recent[mx.array([pick.slot for pick in picks])]  # (n, 20)
        # An empty place repeats the newest token. Where no repetition is penalised all are empty, and any token will
        # do: it is divided by 1.
        recent = mx.minimum(mx.where(recent < memory.V, recent, recent[:, -1:]), memory.V - 1)
        old, penalty = mx.take_along_axis(x, recent, axis=-1), column([p.sampling.repetition_penalty for p in picks])
        x = mx.put_along_axis(x, recent, mx.where(old < 0, old * penalty, old / penalty), axis=-1)
    return x


class Spread(NamedTuple):
    """How the tokens of each row spread out below the likeliest one. V is padded to a multiple of BLOCK here.

    probability = e^-gap / total

    token       a      b      c                 padding
    logit       2.1    4.0    3.3
    gap         1.9    0      0.7               inf
    weight      0.15   1      0.50              0           total 1.65
    """

    gap: mx.array  # (n, V): by how much a logit is smaller than the row's largest
    weights: mx.array  # (n, V): e^-gap
    total: mx.array  # (n, 1): the sum of the weights

    @staticmethod
    def of(x: mx.array) -> tuple[mx.array, Spread]:  # (n, V) -> the largest (n,), and the spread
        if x.shape[-1] % BLOCK:
            x = mx.pad(x, [(0, 0), (0, -x.shape[-1] % BLOCK)], constant_values=-math.inf)
        best = fold(mx.max, x)
        gap = best - x
        weights = shrink(gap)
        # MLX is lazy: for a request that needs no probability, neither the weights nor their sum are computed.
        return best[:, 0], Spread(gap, weights, fold(mx.sum, weights))


def shrink(gap: mx.array) -> mx.array:
    """e^-gap, as a power of 1/e: on a CPU, MLX takes less than half as long for it as for an `exp`."""
    return mx.power(math.exp(-1), gap)


def fold(reduce: Callable[..., mx.array], x: mx.array) -> mx.array:  # (n, V) -> (n, 1)
    """The maximum or the sum of each row: first down the columns of a matrix, then along the row that is left.

    On a CPU this takes a third of the time of going along the whole row. It is more exact, too: near the end of a long
    float32 sum, small numbers are lost beside what has been added up before.
    """
    return reduce(reduce(x.reshape(len(x), BLOCK, -1), axis=1), axis=-1, keepdims=True)


def likeliest(gap: mx.array, k: int) -> mx.array:  # (n, V) -> (n, k)
    """The ids of the k smallest gaps, the smallest first; among equal ones, the lowest id first.

    The k smallest lie in those k blocks whose own smallest are smallest. For k = 2, with blocks of 3:

    gaps       5 2 7 | 4 9 8 | 1 0 6 | 3 3 9
    smallest       2       4       0       3        blocks 0 and 2 are left, and only they are sorted

    For why: any other block's smallest has those of these k blocks before it, and they are k already. The same holds
    among equal gaps, because blocks are in the order of ids. To find the k blocks is the same task on a shorter row.
    """
    n, V = gap.shape
    size = 2 ** round(math.log2(V / k) / 2)  # so that there are about as many blocks as numbers in k blocks
    if size < 4:
        return mx.argsort(gap, axis=-1)[:, :k]
    blocks = mx.pad(gap, [(0, 0), (0, -V % size)], constant_values=math.inf).reshape(n, -1, size)
    best = mx.sort(likeliest(blocks.min(axis=-1), k), axis=-1)[:, :, None]
    left = mx.take_along_axis(blocks, best, axis=1).reshape(n, -1)  # (n, k * size)
    ids = (best * size + mx.arange(size, dtype=mx.uint32)).reshape(n, -1)
    return mx.minimum(take(ids, likeliest(left, k)), V - 1)  # only a row of NaN would choose the padding


def draw(spread: Spread, picks: list[Pick], group: str) -> mx.array:  # (n,)
    """Filter the tokens, then let `land` take one of those that are kept."""
    settings = [pick.sampling for pick in picks]
    gap, ids, keep = spread.gap, None, None
    if group == "short list" or (group == "long list" and gap.shape[-1] <= SORTABLE):
        ids = likeliest(gap, SHORT_LIST if group == "short list" else gap.shape[-1])
        gap = take(gap, ids)
        keep = keep_first(gap, spread.total, settings)
    elif group == "long list":
        keep = keep_nearest(spread, settings)
    elif any(s.min_p > 0 for s in settings):
        keep = gap <= farthest(settings)
    if ids is None and all(s.temperature == 1 for s in settings):
        weights = spread.weights  # as below, bit for bit
    else:
        weights = shrink(gap / column([max(s.temperature, 1e-6) for s in settings]))
    u = column([uniform(pick.seed, pick.index) for pick in picks])
    place = land(weights if keep is None else weights * keep, u)
    return (place if ids is None else take(ids, place))[:, 0]


def farthest(settings: list[Sampling]) -> mx.array:  # (n, 1)
    """The largest gap that min_p keeps: a token that is m times as likely as the likeliest one has the gap -log(m)."""
    return column([-math.log(s.min_p) if s.min_p else math.inf for s in settings])


def keep_first(gap: mx.array, total: mx.array, settings: list[Sampling]) -> mx.array:  # (n, k) -> bool
    """What the filters keep of the likeliest tokens, which are sorted. Each keeps the first so many.

    probability  0.4   0.3   0.2   0.06       top_k = 3      keeps three
    above        0     0.4   0.7   0.9        top_p = 0.6    keeps two, those with less than 0.6 above them
    """
    most = gap.shape[-1]
    keep = (mx.arange(most) < column([min(s.top_k or most, most) for s in settings])) & (gap <= farthest(settings))
    if any(s.top_p < 1 for s in settings):
        above = mx.cumsum(shrink(gap), axis=-1, inclusive=False)
        keep &= above < column([max(s.top_p, 1e-30) if s.top_p < 1 else math.inf for s in settings]) * total
    return keep


def keep_nearest(spread: Spread, settings: list[Sampling]) -> mx.array:  # (n, V) bool
    """The same for any number of tokens, and none is sorted: the filters keep all gaps up to some bound. Which one?

    A bound is too far if the tokens nearer than it have all the probability that top_p wants, or are as many as top_k.
    Bisection finds the farthest that is not, exactly. For this, a float's bits are read as a whole number. The order of
    floats above 0 is the order of those numbers, so the bound is found bit by bit, the highest first:

    is 2.0 too far?   yes: the bit is 0
    is 1.1e-19 ...    no:  the bit is 1        and so on, 31 times

    Probabilities are counted in units of 2^-31. A sum of whole numbers is exact, in whatever order a device adds.
    """
    gap, V = spread.gap, spread.gap.shape[-1]
    scale, far = 2.0**31 / spread.total, farthest(settings)
    most = mx.array([[min(s.top_k or V, V)] for s in settings])

    def units(weights: mx.array) -> mx.array:
        return (weights * scale).astype(mx.uint32)

    mass = units(spread.weights)
    has_top_p = any(s.top_p < 1 for s in settings)
    # A top_p of 1 keeps everything: half as much again is never reached. Any other keeps one token at least.
    wanted = column([max(s.top_p, 1e-30) if s.top_p < 1 else 1.5 for s in settings])
    wanted = mx.ceil(wanted * mass.sum(axis=-1, keepdims=True)).astype(mx.uint32)

    def room_at(bound: mx.array) -> mx.array:  # (n, 1) -> (n, 1)
        """How many tokens at this bound are kept, if there are so many: none, if it is too far."""
        count = (gap < bound).sum(axis=-1, keepdims=True)
        room = (most - count) * (bound <= far)
        if has_top_p:
            # subtle: this is the mass of all that are nearer. The others have `own` at most, and are raised to it. To
            # pick the nearer ones out would take MLX five times as long. The sum may pass 2^32 and begin again at 0;
            # the difference is right nevertheless.
            own = units(shrink(bound))
            reached = mx.maximum(mass, own).sum(axis=-1, keepdims=True) - own * (V - count).astype(mx.uint32)
            lacking, each = wanted - mx.minimum(reached, wanted), mx.maximum(own, 1)
            room = mx.minimum(room, lacking // each + (lacking % each > 0))
        return room

    bits = mx.zeros(far.shape, mx.uint32)
    for bit in reversed(range(31)):
        guess = bits + 2**bit
        bits = mx.where(room_at(guess.view(mx.float32)) > 0, guess, bits)
    bound = bits.view(mx.float32)
    ties = gap == bound  # of these, the filters keep as many as there is room for: those with the lowest ids
    return (gap < bound) | (ties & (mx.cumsum(ties, axis=-1) <= room_at(bound)))


def land(weights: mx.array, u: mx.array) -> mx.array:  # (n, V) and (n, 1) -> (n, 1)
    """The place at which the running sum of the weights passes u times the whole sum.

    weights  | 0.5      | 0.3   | 0.2 |        u = 0.6 falls into the second
    sums     0         0.5     0.8    1

    One running sum over V float32 numbers would lose the small ones. So blocks are added up, and blocks of blocks. The
    place is found from the top: in which large block it lies, in which of its blocks, and where in that one.
    """
    levels = [weights]
    while levels[-1].shape[-1] > BLOCK:
        sums = levels[-1].reshape(len(weights), -1, BLOCK).sum(axis=-1)
        levels.append(mx.pad(sums, [(0, 0), (0, -sums.shape[-1] % BLOCK)]))
    mark, place = u * levels[-1].sum(axis=-1, keepdims=True), mx.zeros(u.shape, mx.int32)
    for level in reversed(levels):
        block = take(level, place * BLOCK + mx.arange(BLOCK))
        sums = mx.cumsum(block, axis=-1)
        # Rounding may put the mark at an end of the block, where a token may have been filtered. Keep off the ends.
        mark = mx.clip(mark, 0, sums[:, -1:] * (1 - 2**-22))
        inside = mx.minimum((sums <= mark).sum(axis=-1, keepdims=True), BLOCK - 1)
        mark, place = mark - take(sums - block, inside), place * BLOCK + inside
    return place


def measure(spread: Spread, picks: list[Pick], chosen: mx.array, V: int) -> Logprobs:
    """log(e^-gap / total): the log probabilities at temperature 1, before any filter."""
    log_total = mx.log(spread.total)
    most = min(max(pick.sampling.logprobs for pick in picks), V)
    top_ids = likeliest(spread.gap, most) if most else mx.zeros((len(picks), 0), mx.uint32)
    own = (-take(spread.gap, chosen[:, None]) - log_total)[:, 0]
    return Logprobs([pick.slot for pick in picks], own, top_ids, -take(spread.gap, top_ids) - log_total)


def take(x: mx.array, places: mx.array) -> mx.array:  # (n, m) and (n, k) -> (n, k)
    return mx.take_along_axis(x, places, axis=-1)


def column(values: list[float]) -> mx.array:  # (n, 1)
    return mx.array(values, dtype=mx.float32)[:, None]


def uniform(seed: int, index: int) -> float:
    """The index-th number of a seed's own sequence: above 0 and below 1. It is a hash, so there is no state.

    It has 22 bits, so that u times a float32 sum is always below the sum.
    """
    x = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) % 2**64
    for _ in range(2):  # splitmix64's finisher: every bit of the input reaches every bit of the output
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        x ^= x >> 31
    return ((x >> 42) + 0.5) / 2**22
