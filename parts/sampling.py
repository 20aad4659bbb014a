"""What a request asks for, and how its tokens are chosen from the logits.

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

Where next: `nanobatch.py`, which calls `choose` in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from parts.checks import real, shown, whole
from parts.device import mx

PENALTY_CONTEXT = 20  # repetition_penalty looks at this many of the last tokens, whether of the prompt or of the answer
# For a top_k up to this a short list is sorted; for a larger one, or top_p alone, all of V.
SHORT_LIST = 64
LIMITS = {  # for each field that is a number: the check, the least and the most
    "max_tokens": (whole, 1, math.inf),
    "temperature": (real, 0, 1_000_000),
    "top_p": (real, 0, 1),
    "top_k": (whole, 0, math.inf),
    "min_p": (real, 0, 1),
    "seed": (whole, -(2**63), 2**64 - 1),
    "repetition_penalty": (real, 0.001, 1000),
    "logprobs": (whole, 0, 100),
}


@dataclass(frozen=True)
class Sampling:
    """How one request wants its tokens chosen, and when its answer ends. The default is greedy."""

    max_tokens: int | None = 128  # None means to the end of the slot
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # the most likely tokens that together reach this probability; 1 keeps all
    top_k: int = 0  # the k most likely tokens; 0 keeps all
    min_p: float = 0.0  # tokens at least this fraction as likely as the most likely one; 0 keeps all
    seed: int | None = None  # None gives other tokens each time
    stop: str | int | Sequence[str | int] = ()  # texts and token ids that end the answer, and are not part of its text
    repetition_penalty: float = 1.0  # recent tokens' logits are divided (or, if negative, multiplied) by this
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to these tokens' logits; -1000 forbids one
    logprobs: int | None = None  # the chosen token's log probability, and those of the n most likely
    ignore_eos: bool = False  # go on after the model's own end token

    def __new__(cls, *args, **given):  # Python's TypeError for an unknown field would not name the others
        if unknown := given.keys() - cls.__annotations__.keys():
            raise ValueError(
                f"Sampling has no field {shown(min(unknown))}; the fields are {', '.join(cls.__annotations__)}"
            )
        return super().__new__(cls)

    def __post_init__(self):
        for name, (check, least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None or name not in ("max_tokens", "seed", "logprobs"):
                object.__setattr__(self, name, check(name, value, least, most))
        if self.top_p == 0:
            raise ValueError("top_p = 0 keeps no token; it must be above 0 and at most 1")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos = {shown(self.ignore_eos)}, but it must be True or False")
        self._check_stop()
        self._check_bias()

    def _check_stop(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, (str, int)) else self.stop
        if not isinstance(stops, Sequence):
            raise ValueError(f"stop = {shown(stops)}, but it must be texts or token ids")
        for stop in stops:
            if isinstance(stop, bool) or not isinstance(stop, (str, int)) or stop == "":
                raise ValueError(f"stop holds {shown(stop)}, but it must be texts that are not empty, or token ids")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_texts", [stop for stop in stops if isinstance(stop, str)])
        object.__setattr__(self, "stop_tokens", frozenset(stop for stop in stops if isinstance(stop, int)))

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping) or not all(type(token) is int for token in self.logit_bias):
            raise ValueError(f"logit_bias = {shown(self.logit_bias)}, but it must map token ids to numbers")
        biases = {t: real(f"logit_bias for token {t}", b, -(10**9), 10**9) for t, b in self.logit_bias.items()}
        # This is a copy, so that what has been checked cannot change any more.
        object.__setattr__(self, "logit_bias", MappingProxyType(biases))

    @property
    def group(self) -> str:
        """The kind of work that choosing a token takes. It depends on these settings alone."""
        edited = self.logit_bias or self.repetition_penalty != 1 or self.logprobs is not None
        if self.temperature == 0:
            return "edited" if edited else "greedy"
        if 0 < self.top_k <= SHORT_LIST:
            return "short list"
        return "sorted" if self.top_k or self.top_p < 1 or self.min_p > 0 else "open"


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


def choose(
    logits: mx.array, rows: Sequence[int], picks: Sequence[Pick], history: mx.array
) -> tuple[mx.array, list[Logprobs]]:
    """A token for each pick: logits (B, V) -> (picks,) int32, -1 where the logits were not finite.

    `rows` holds each pick's row of the logits. `history` (slots, PENALTY_CONTEXT) holds each slot's recent tokens, and
    V where there were none.
    """
    groups: dict[str, list[int]] = {}
    for place, pick in enumerate(picks):
        groups.setdefault(pick.sampling.group, []).append(place)
    tokens, order, logprobs = [], [], []
    for group, places in groups.items():
        members = [picks[place] for place in places]
        some = mx.array([rows[place] for place in places])
        if group == "greedy":
            chosen = mx.argmax(logits, axis=-1)[some]
        else:
            x = edit(logits[some].astype(mx.float32), members, history)  # (n, V)
            chosen = mx.argmax(x, axis=-1) if group == "edited" else draw(x, members, group)
            logprobs += measure(x, members, chosen)
        value = logits[some, chosen]  # argmax and sort let NaN pass in silence, so we look
        tokens.append(mx.where(mx.isfinite(value), chosen.astype(mx.int32), -1))
        order += places
    together = mx.concatenate(tokens)
    if order != sorted(order):
        together = together[mx.array([order.index(place) for place in range(len(picks))])]
    return together, logprobs


def edit(x: mx.array, picks: list[Pick], history: mx.array) -> mx.array:  # (n, V) -> (n, V)
    """logit_bias, then repetition_penalty."""
    biases = [(i, token, bias) for i, pick in enumerate(picks) for token, bias in pick.sampling.logit_bias.items()]
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        x = x.at[mx.array(rows), mx.array(tokens)].add(mx.array(values, dtype=x.dtype))
    if any(pick.sampling.repetition_penalty != 1 for pick in picks):
        n, V = x.shape
        recent = mx.zeros((n, V + 1), mx.bool_)  # one column more, for the empty places of the history
        recent[mx.arange(n)[:, None], history[mx.array([pick.slot for pick in picks])]] = True
        penalty = column([pick.sampling.repetition_penalty for pick in picks])
        x = mx.where(recent[:, :V], mx.where(x < 0, x * penalty, x / penalty), x)
    return x


def draw(x: mx.array, picks: list[Pick], group: str) -> mx.array:  # (n, V) -> (n,)
    """Filter the tokens, then take the one at which the running sum of the weights passes u times the whole sum.

    weights  | 0.5      | 0.3   | 0.2 |        u = 0.6 falls into the second
    sums     0         0.5     0.8    1
    """
    settings = [pick.sampling for pick in picks]
    if group == "open":
        ids, kept = None, x
    else:
        most = SHORT_LIST if group == "short list" and x.shape[-1] > SHORT_LIST else x.shape[-1]
        ids = mx.argpartition(-x, kth=most - 1, axis=-1)[:, :most] if most < x.shape[-1] else None
        short = x if ids is None else mx.take_along_axis(x, ids, axis=-1)
        order = mx.argsort(-short, axis=-1)
        ids = order if ids is None else mx.take_along_axis(ids, order, axis=-1)  # (n, most), the likeliest first
        kept = mx.take_along_axis(short, order, axis=-1)  # logits, in the order of ids
        keep = mx.arange(most) < column([min(s.top_k or most, most) for s in settings])
        if any(s.top_p < 1 for s in settings):
            p = mx.exp(kept - mx.logsumexp(x, axis=-1, keepdims=True))
            above = mx.cumsum(p, axis=-1, inclusive=False)  # the probability of all likelier tokens together
            keep &= (above < column([s.top_p for s in settings])) | (column([s.top_p for s in settings]) == 1)
        if any(s.min_p > 0 for s in settings):
            keep &= kept - kept[:, :1] >= column([math.log(s.min_p) if s.min_p else -math.inf for s in settings])
        kept = mx.where(keep, kept, -mx.inf)
    best = kept.max(axis=-1, keepdims=True)
    weights = mx.exp((kept - best) / column([max(s.temperature, 1e-6) for s in settings]))
    sums = mx.cumsum(weights, axis=-1)
    u = column([uniform(pick.seed, pick.index) for pick in picks])
    place = (sums <= u * sums[:, -1:]).sum(axis=-1, keepdims=True)
    place = mx.minimum(place, kept.shape[-1] - 1)  # only NaN gets beyond the last
    return (place if ids is None else mx.take_along_axis(ids, place, axis=-1))[:, 0]


def measure(x: mx.array, picks: list[Pick], chosen: mx.array) -> list[Logprobs]:
    """The log probabilities that some requests want to know, at temperature 1 and before any filter."""
    wanted = [i for i, pick in enumerate(picks) if pick.sampling.logprobs is not None]
    if not wanted:
        return []
    some, ids = x[mx.array(wanted)], chosen[mx.array(wanted)]
    logprobs = some - mx.logsumexp(some, axis=-1, keepdims=True)  # (n, V)
    most = min(max(picks[i].sampling.logprobs for i in wanted), x.shape[-1])
    top_ids = mx.argsort(-logprobs, axis=-1)[:, :most]
    slots, own = [picks[i].slot for i in wanted], mx.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]
    return [Logprobs(slots, own, top_ids, mx.take_along_axis(logprobs, top_ids, axis=-1))]


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
