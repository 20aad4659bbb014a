"""Guesses: what may come next in an answer, and whether it pays to try.

The problem. A step reads every weight to bring one token to each answer, and would check several at
little more. But which? Much of what a model writes has stood before: code that is rewritten, a text
that is quoted, the keys of a schema. And a draft has a price: its row, and run-ahead, since a step
with draft tokens is read before the next one is planned.

The way out. A pointer follows the place where the two newest tokens stood side by side before:

    owl, cat, fox, bee ...  answer so far: owl, cat,        draft:  fox , bee ,
              ^                            ^^^^ stood before
              the pointer, which moves on with each token that comes as the text says

That is one look into a dictionary for each token. Tokens that come as the pointer says are *hits*,
whether they were drafted or not. How often there is a hit depends on how many hits stand before it:
of a pair that stood before, a third may go on in the same way; of a run of four, nearly all. So an
answer keeps a rate for each length of a run, and draft tokens as far as the chance is worth the price of
a row, which is learned from the clock. Nothing else makes it pause: where draft tokens fail, the rates
fall. Under a grammar some tokens are forced: these draft tokens are always right.

What this file keeps. A draft changes no token: `Scheduler.commit` takes what the sampler says. So
what is drafted may depend on the clock. A text of one client is never looked up for another. And
steps that others share become longer by about a twentieth at most, on average. (By more beside one
other alone, since an answer counts as a copy until its first draft tokens have been read.)

Where next: `Scheduler.plan`, which asks, and `Scheduler.commit`, which decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from typing import Any

from sched import Plan, Request

MOST = 15  # so many tokens of an answer are drafted at a time, unless the engine is told otherwise
# How often a token comes as the pointer says, behind 0, 1, 2, 3 and more hits: so an answer begins.
USUAL = (0.4, 0.6, 0.7, 0.85, 0.93)
COPIED = 0.3  # the share of hits among an answer's tokens, to begin with
NEWEST = 0.1  # the weight of the newest token in these
FORGET = 0.02  # and of the newest step in what steps cost
WAITING = 0.05  # a step that is read before the next one is planned takes so much longer
PATIENCE = 0.05  # so much longer may steps be for those who gain nothing
COPIES = 0.25  # below this share of hits, an answer gains nothing
SELDOM = 16  # a grammar that has forced nothing for so many tokens is asked once in so many


class Pairs:
    """The tokens of a text, and where it went on behind each pair of them the last time."""

    def __init__(self, tokens: Iterable[int]):
        self.tokens = list(tokens)
        # A prompt may have a hundred thousand tokens, and all who decode would wait for a loop.
        self.behind = dict(zip(pairwise(self.tokens), count(2), strict=False))

    def add(self, token: int) -> None:
        if self.tokens:
            self.behind[self.tokens[-1], token] = len(self.tokens) + 1
        self.tokens.append(token)


class PromptLookup:
    """What may follow in one answer.

    `grammar`: where the answer stands in its grammar, if it has one (`text/grammar.py`).
    """

    def __init__(self, grammar: Any = None):
        self.text: Pairs | None = None  # prompt and answer, once there is a token to draft
        self.hits = 0  # so many tokens in a row came as the pointer says
        self.rates = list(USUAL)  # how often there is a hit, by the hits before
        self.copied = COPIED  # the share of hits among the newest tokens
        self._grammar = grammar
        self._earlier: Pairs | None = None  # of the same client
        self._source: Pairs | None = None  # where the pointer stands
        self._at = 0  # the token there may come next
        self._read = 0  # so many tokens of the answer have been read
        self._sure = 0  # up to here, tokens of the answer were forced last

    def begin(self, prompt: Sequence[int], earlier: Pairs | None) -> None:
        self.text = Pairs(prompt[:-1])
        self._earlier = earlier
        self._push(prompt[-1:])
        self.copied = COPIED

    def follow(self, answer: Sequence[int]) -> None:
        """Read the tokens that are new in an answer."""
        new = answer[self._read :]
        self._push(new)
        self._read = len(answer)

    def _push(self, tokens: Iterable[int]) -> None:
        text = self.text
        for token in tokens:
            is_hit = self._is_hit(token)
            if self._source is None and text.tokens:
                self._point((text.tokens[-1], token))
            text.add(token)
            self.copied += NEWEST * (is_hit - self.copied)

    def _is_hit(self, token: int) -> bool:
        """Does this token come as the pointer says? The pointer moves on, or is gone."""
        source = self._source
        if source is None:
            return False
        is_hit = source.tokens[self._at] == token
        run = min(self.hits, len(USUAL) - 1)
        self.rates[run] += NEWEST * (is_hit - self.rates[run])
        self.hits = self.hits + 1 if is_hit else 0
        self._at += 1
        if not is_hit or self._at == len(source.tokens):
            self._source = None
        return is_hit

    def _point(self, pair: tuple[int, int]) -> None:
        for text in (self.text, self._earlier):
            if text is not None and text.behind.get(pair, len(text.tokens)) < len(text.tokens):
                self._source = text
                self._at = text.behind[pair]
                return

    def forced(self, most: int) -> list[int]:
        """The tokens that the grammar forces."""
        tokens = [] if self._grammar is None else self._grammar.forced()
        if tokens:
            self._sure = self._read + len(tokens)
        return tokens[:most]

    def draft(self, most: int) -> list[int]:
        """The tokens at the pointer."""
        if self._source is None:
            return []
        return self._source.tokens[self._at : self._at + most]

    def chances(self, count: int, hits: int | None = None) -> list[float]:
        """How likely each of so many draft tokens is right, if all before it are."""
        run = self.hits if hits is None else hits
        return [self.rates[min(run + i, len(USUAL) - 1)] for i in range(count)]

    @property
    def may_be_forced(self) -> bool:
        """Is the grammar to be asked, as soon as the newest token is known?"""
        if self._grammar is None:
            return False
        return self._read - self._sure < SELDOM or self._read % SELDOM == 0

    @property
    def next(self) -> tuple[float, int]:
        """How likely there is a pointer behind the token that comes next, and behind how many hits."""
        if self._source is None:
            return self.copied, 0
        return self.chances(1)[0], self.hits + 1

    @property
    def gains(self) -> bool:
        """Is so much of this answer drafted that longer steps are worth it?"""
        return self.copied >= COPIES or (self._grammar is not None and self._sure > 0)


class Drafter:
    """Guesses in an engine's steps: the scheduler calls it (`sched.Guess`).

    `most`: so many tokens of each answer, whatever they cost. None: where they pay.
    """

    def __init__(self, most: int | None = None):
        if most is not None and most < 0:
            raise ValueError(f"speculate = {most}, but it must be at least 0")
        self.most = most
        self._texts: dict[int, tuple[str, Pairs]] = {}  # by slot: whose text it had last
        # A step takes so many seconds, and so many more for each of its rows.
        self._step_s = self._row_s = 0.0
        self._sums = [0.0] * 5  # of steps, rows, rows squared, seconds, rows times seconds
        self._last = 0.0  # when the newest step was read
        self._owed = 0.0  # so many steps were lost by those who gain nothing

    def __call__(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        drafts: dict[int, tuple[int, ...]] = {}
        self._owed = max(0.0, self._owed - PATIENCE)
        if self._must_wait(decoding):
            return drafts
        rows = len(decoding)
        expected = float(rows)  # tokens of this step
        for request in decoding:
            # A draft follows the newest token, so all tokens must have been read.
            lookup = self._follow(request) if request.planned == request.committed else None
            most = min(left, request.max_tokens - request.planned - 1, self.most or MOST)
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
            self._owed = WAITING + longer / self._seconds(len(decoding))
        return drafts

    def _seconds(self, rows: int) -> float:
        """What a step of so many rows takes."""
        return self._step_s + self._row_s * rows

    def _must_wait(self, requests: Iterable[Request]) -> bool:
        """Do some of them gain nothing, and have lost what they may lose?"""
        return self.most is None and self._owed > 0 and not self._all_gain(requests)

    def _all_gain(self, requests: Iterable[Request]) -> bool:
        known = [
            request.draft_source for request in requests
        ]  # another thread may end one meanwhile
        return all(lookup is not None and lookup.gains for lookup in known)

    def _paying(self, chances: Sequence[float], rows: int, expected: float) -> tuple[int, float]:
        """How many of these draft tokens bring more tokens a second than the step has without them? And
        how many tokens are expected then?

        A draft is right if all before it are. With a chance of c for one token more, a row more
        pays if (expected + c) / (seconds + a row's) is above expected / seconds.
        """
        chance = 1.0
        for i, each in enumerate(chances):
            chance *= each
            if chance * self._seconds(rows) <= self._row_s * expected:
                return i, expected
            rows += 1
            expected += chance
        return len(chances), expected

    def may_follow(self, plan: Plan) -> bool:
        """Does it pay to read the tokens of this step before the next one is planned, since there may
        be draft tokens in the next?"""
        requests = [member.request for member in plan.emitters]
        found = [self._follow(r) for r in requests if r.max_tokens - r.planned > 1]
        known = [lookup for lookup in found if lookup is not None]
        if self.most is not None:
            return bool(known)
        if self._must_wait(requests):
            return False
        rows = len(requests)
        gain = sum(self._gain(lookup, rows) for lookup in known)
        return gain > WAITING * rows * self._seconds(rows)

    def _gain(self, lookup: PromptLookup, rows: int) -> float:
        """What may be gained by draft tokens in a step of so many rows: tokens times seconds."""
        if lookup.may_be_forced:
            return math.inf
        chance, hits = lookup.next
        count, expected = self._paying(lookup.chances(MOST, hits), rows, rows)
        return chance * ((expected - rows) * self._seconds(rows) - count * self._row_s * rows)

    def _follow(self, request: Request) -> PromptLookup | None:
        """What may follow in this answer, as far as it has been read."""
        lookup = request.draft_source  # another thread may end the request meanwhile
        if lookup is None or request.slot is None:
            return None
        if lookup.text is None:
            client, text = self._texts.pop(request.slot, ("", None))
            is_known = bool(request.client) and request.prefix_cache
            lookup.begin(request.prompt, text if is_known and client == request.client else None)
            if is_known:
                self._texts[request.slot] = request.client, lookup.text
        lookup.follow(request.answer)
        return lookup

    def learn(self, plan: Plan, read: float) -> None:
        """This step was read at this moment: what do a step and a row cost?

        Of late, as it were: a line through the newest steps, without those that read a prompt.
        """
        seconds = read - max(self._last, plan.at)
        self._last = read
        if plan.chunks or self.most is not None:
            return
        rows = len(plan.decodes) + plan.draft_tokens
        if (
            self._sums[0] > 5
        ):  # some steps are known; and another program may have had the processor
            seconds = min(seconds, 2 * self._seconds(rows))
        newest = (1, rows, rows * rows, seconds, rows * seconds)
        self._sums = [(1 - FORGET) * a + b for a, b in zip(self._sums, newest, strict=True)]
        n, r, rr, s, rs = self._sums
        usual = s / n
        spread = n * rr - r * r
        # As long as all steps had as many rows, a row is taken to cost a tenth of a step.
        slope = (n * rs - r * s) / spread if spread > 0.5 * n else 0.1 * usual
        # The price is no more than most of what a row costs in all. Else one step that was interrupted
        # could end all draft tokens, and no step would ever tell of a better price.
        self._row_s = min(max(slope, 0.02 * usual), 0.8 * s / r)
        self._step_s = max(usual - self._row_s * r / n, 0.0)
