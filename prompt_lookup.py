"""Speculative decoding: which draft tokens to propose, and whether they pay off.

The problem. A step reads every weight to add one token to each answer, and could verify several at
little extra cost. But which? Much of what a model writes repeats earlier text: code that is edited,
a text that is quoted, the keys of a schema. And a draft has a cost: a row for each token, and
run-ahead, because a step with draft tokens is read before the next one is planned.

The solution: prompt lookup. A pointer follows the place where the two newest tokens occurred before:

    owl , cat , fox , bee ...   answer so far: owl , cat ,    draft: fox , bee ,
                ^                                  ^^^^^ these two occurred before; fox was next
                the pointer, which moves on with each token that matches

That costs one dictionary lookup for each token. A token that equals the one at the pointer is a
*match*, whether it was drafted or not. How likely a match is depends on how many matches precede it:
half of the texts go on after a pair as they did before, and nearly all after a run of ten. So an
answer keeps a rate for each length of a run, and drafts as far as the chance is worth the cost of a
row, which is learned from the clock. Where drafts are rejected, the rates fall, and no other rule is
needed to stop. Under a grammar some tokens are forced: these are always right.

The invariant: if the engine `is_batch_invariant`, a draft changes no token, because
`Scheduler.commit` takes only sampled tokens. So a draft may depend on the clock. A request looks up
its own text only, never another's. And drafting costs a request that gains nothing about 5 % at
most, on average. (More in the first steps of an answer, which is assumed to gain until its tokens show otherwise.)

Where next: `Scheduler.plan`, which asks for drafts, and `Scheduler.commit`, which accepts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING

from request import Plan, Request

if TYPE_CHECKING:
    from text.grammar import Grammar

# Measured by replaying 20 greedy answers of up to 300 tokens (Qwen 2.5 0.5B, SmolLM2 135M; half of the
# prompts ask for a text to be copied or changed), alone and four at a time, where a row costs 0.03 to
# 0.7 of a step. After each constant: other values, and how much longer (+) or shorter (-) all steps
# together take with them.

# Draft tokens of an answer in a step, unless the engine is given a number. 7: +2.5 %, 31: -0.6 %
MOST = 15
# The weight of the newest token or step in moving averages. 0.02: +0.8 %, 0.2: +0.2 %
RECENT = 0.05
# A step counts as at most this many times as long as expected. 4: +1.4 %, no limit: +3.9 %, if one step
# in 20 takes up to 150 times as long
OUTLIER = 1.5
# The share of copies from which on an answer gains by drafts. 0.1: -0.6 %, but an answer next to one that
# copies takes up to 27 % longer, and 6 % with this value. 0.5: +2.6 %
GAINS = 0.25
# As shares of a step: the slowdown that is allowed for requests that gain nothing, and two assumed
# costs: losing run-ahead, and a row until it is measured. 0.02: +1.1 %, 0.2: +0.2 %
SLOWDOWN = 0.05


class Bigrams:
    """The tokens of a text, and for each bigram the index after its last occurrence."""

    def __init__(self, tokens: Iterable[int]):
        self.tokens = list(tokens)
        # Not in a Python loop: a prompt may have 100,000 tokens, and all decoding requests wait for it
        self.after = dict(zip(pairwise(self.tokens), count(2), strict=False))

    def add(self, token: int) -> None:
        if self.tokens:
            self.after[self.tokens[-1], token] = len(self.tokens) + 1
        self.tokens.append(token)


class PromptLookup:
    """The draft source of one answer (`Drafting.source`).

    `grammar`: the state of the answer's grammar, if it has one.
    """

    def __init__(self, grammar: Grammar | None = None):
        self.text: Bigrams | None = None  # prompt and answer, once there is a token to draft
        self.matches = 0  # the length of the current run of matches
        # The chance of a match after n matches, initially by Laplace's rule of succession
        self.rates = [(n + 1) / (n + 2) for n in range(MOST)]
        self.copied = 0.5  # the share of matches among the newest tokens
        self._grammar = grammar
        self._at: int | None = None  # the pointer: the index of the predicted token
        self._read = 0  # number of answer tokens processed so far
        self._sure = 0  # the index after the last forced token

    def index_prompt(self, prompt: Sequence[int]) -> None:
        self.text = Bigrams(prompt[:-1])
        self._push(prompt[-1])

    def follow(self, answer: Sequence[int]) -> None:
        """Process the new tokens of an answer."""
        for token in answer[self._read :]:
            is_match = self._push(token)
            self._read += 1
            weight = max(RECENT, 1 / (self._read + 2))  # a plain mean over the first tokens
            self.copied += weight * (is_match - self.copied)

    def _push(self, token: int) -> bool:
        """Append a token to the text. Return True if it is a match."""
        text = self.text
        is_match = self._is_match(token)
        if self._at is None and text.tokens:
            self._at = text.after.get((text.tokens[-1], token))
        text.add(token)
        return is_match

    def _is_match(self, token: int) -> bool:
        """True if this token equals the one at the pointer. Advance the pointer, or drop it."""
        if self._at is None:
            return False
        is_match = self.text.tokens[self._at] == token
        run = min(self.matches, len(self.rates) - 1)
        self.rates[run] += RECENT * (is_match - self.rates[run])
        self.matches = self.matches + 1 if is_match else 0
        self._at = self._at + 1 if is_match else None
        return is_match

    def forced(self, most: int) -> list[int]:
        """Return the tokens that the grammar forces, at most `most`."""
        tokens = [] if self._grammar is None else self._grammar.forced()
        if tokens:
            self._sure = self._read + len(tokens)
        return tokens[:most]

    def draft(self, most: int) -> list[int]:
        """Return the tokens from the pointer on, at most `most`."""
        if self._at is None:
            return []
        return self.text.tokens[self._at : self._at + most]

    def chances(self, count: int, matches: int | None = None) -> list[float]:
        """The acceptance probability of each of `count` draft tokens, if all before it are."""
        run = self.matches if matches is None else matches
        return [self.rates[min(run + i, len(self.rates) - 1)] for i in range(count)]

    @property
    def may_be_forced(self) -> bool:
        """True if the grammar may force a token after the newest one. It is asked at the first MOST tokens
        after a forced one, and then at every MOST-th."""
        if self._grammar is None:
            return False
        unforced = self._read - self._sure
        return unforced < MOST or unforced % MOST == 0

    @property
    def next_chance(self) -> tuple[float, int]:
        """The chance that there is a pointer after the next token, and the length of its run then."""
        if self._at is None:
            return self.copied, 0
        return self.chances(1)[0], self.matches + 1

    @property
    def gains(self) -> bool:
        """True if enough tokens are copies to make longer steps worthwhile."""
        return self.copied >= GAINS or (self._grammar is not None and self._sure > 0)


class Drafter:
    """Proposes the draft tokens of an engine's steps. The scheduler calls it (`request.ProposeDrafts`).

    `most`: up to this many tokens per answer and step, whatever they cost. None: where they pay off.
    """

    def __init__(self, most: int | None = None):
        if most is not None and most < 0:
            raise ValueError(f"speculate = {most}, but it must be at least 0")
        self.most = most
        # Seconds of a step without rows, and of each row
        self._step_s = self._row_s = 0.0
        self._sums = [0.0] * 5  # steps, rows, rows squared, seconds, rows times seconds
        self._last = 0.0  # when the newest step was read
        # The slowdown of requests that gain nothing, in steps. Each step pays off SLOWDOWN: a draft that
        # makes a step 30 % longer is followed by 6 steps without
        self._owed = 0.0

    def __call__(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        drafts: dict[int, tuple[int, ...]] = {}
        self._owed = max(0.0, self._owed - SLOWDOWN)
        if self._must_wait(decoding):
            return drafts
        limit = MOST if self.most is None else self.most
        rows = len(decoding)
        expected = float(rows)  # tokens of this step
        for request in decoding:
            # A draft continues the newest token, so all tokens must have been read
            is_read = request.planned == len(request.answer)
            lookup = self._follow(request) if is_read else None
            most = min(left, request.max_tokens - request.planned - 1, limit)
            if lookup is None or most < 1:
                continue
            draft = forced = lookup.forced(most)
            chances = [1.0] * len(forced)
            if not forced:
                draft = lookup.draft(most)
                chances = lookup.chances(len(draft))
            if self.most is None:
                count, expected = self._paying(chances, rows, expected)
                draft = draft[:count]
            if draft:
                drafts[request.id] = tuple(draft)
                left -= len(draft)
                rows += len(draft)
        others = [request for request in decoding if request.id not in drafts]
        if drafts and self.most is None and not self._all_gain(others):
            longer = self._row_s * (rows - len(decoding))
            # If a row costs 0.1 of a step, 3 draft tokens owe 0.3. + SLOWDOWN, because the next call
            # subtracts it before its draft
            self._owed = SLOWDOWN + longer / self._seconds(len(decoding))
        return drafts

    def _seconds(self, rows: int) -> float:
        """The expected duration of a step with this many rows."""
        return self._step_s + self._row_s * rows

    def _must_wait(self, requests: Iterable[Request]) -> bool:
        """True if requests that gain nothing have been slowed down as much as is allowed."""
        return self.most is None and self._owed > 0 and not self._all_gain(requests)

    def _all_gain(self, requests: Iterable[Request]) -> bool:
        # Read `source` once: another thread may end the request
        known = [request.drafting.source for request in requests]
        return all(lookup is not None and lookup.gains for lookup in known)

    def _paying(self, chances: Sequence[float], rows: int, expected: float) -> tuple[int, float]:
        """Return the number of draft tokens that pay off, and the expected tokens of the step with them.

        A draft token is accepted only if all before it are. With a chance of c for one more token,
        one more row pays off if (expected + c) / (seconds + seconds of a row) is above expected /
        seconds.
        """
        chance = 1.0
        for i, each in enumerate(chances):
            chance *= each
            if chance * self._seconds(rows) <= self._row_s * expected:
                return i, expected
            rows += 1
            expected += chance
        return len(chances), expected

    def should_read_now(self, plan: Plan) -> bool:
        """True if it pays to read this step's tokens before the next one is planned, so that the next one
        may have draft tokens."""
        requests = [member.request for member in plan.emitters]
        found = [self._follow(r) for r in requests if r.max_tokens - r.planned > 1]
        known = [lookup for lookup in found if lookup is not None]
        if self.most is not None:
            return bool(known)
        if self._must_wait(requests):
            return False
        rows = len(requests)
        gain = sum(self._gain(lookup, rows) for lookup in known)
        return gain > SLOWDOWN * rows * self._seconds(rows)  # the cost of losing run-ahead

    def _gain(self, lookup: PromptLookup, rows: int) -> float:
        """The expected gain of drafting in a step with this many rows, in tokens times seconds.

        With c draft tokens, a step yields `expected` tokens in S + c * R seconds; without drafts, `rows`
        tokens in S seconds.
        The gain is expected * S - rows * (S + c * R), which is above 0 where tokens a second are more.
        """
        if lookup.may_be_forced:
            return math.inf
        chance, matches = lookup.next_chance
        count, expected = self._paying(lookup.chances(MOST, matches), rows, rows)
        return chance * ((expected - rows) * self._seconds(rows) - count * self._row_s * rows)

    def _follow(self, request: Request) -> PromptLookup | None:
        """Bring a request's draft source up to date with its answer, and return it."""
        lookup = request.drafting.source  # read once: another thread may end the request
        if lookup is None or request.slot is None:
            return None
        if lookup.text is None:
            lookup.index_prompt(request.prompt)
        lookup.follow(request.answer)
        return lookup

    def learn(self, plan: Plan, read: float) -> None:
        """Fit the costs of a step and of a row to the recent steps, after a step was read back.

        By exponentially weighted least squares, excluding steps with chunks of prompts.
        """
        seconds = read - max(self._last, plan.at)
        self._last = read
        if plan.chunks or self.most is not None:
            return
        rows = len(plan.decodes) + plan.draft_tokens
        if self._sums[0]:  # limit outliers: another program may have had the processor
            seconds = min(seconds, OUTLIER * self._seconds(rows))
        newest = (1, rows, rows * rows, seconds, rows * seconds)
        self._sums = [(1 - RECENT) * a + b for a, b in zip(self._sums, newest, strict=True)]
        n, r, rr, s, rs = self._sums
        usual = s / n
        # Slope = covariance / variance. If all steps have the same number of rows, both are 0, so a prior
        # is added: one more step, in which a row costs SLOWDOWN of a step
        covariance = rs - r * s / n + SLOWDOWN * usual
        variance = rr - r * r / n + 1
        slope = covariance / variance
        self._row_s = min(max(slope, 0.0), s / r)
        self._step_s = usual - self._row_s * r / n
