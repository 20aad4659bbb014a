"""Guesses: what may come next in an answer, and whether it pays to try.

The problem. A step reads every weight to bring one token to each answer, and would check several at
little more. But which? Much of what a model writes has stood before: code that is rewritten, a text
that is quoted, the keys of a schema. And a guess has a price: its row, and run-ahead, since a step
with guesses is read before the next one is planned.

The way out. A pointer follows the place where the two newest tokens stood side by side before:

    owl, cat, fox, bee ...  answer so far: owl, cat,        guess:  fox , bee ,
              ^                            ^^^^ stood before
              the pointer, which moves on with each token that comes as the text says

That is one look into a dictionary for each token. Tokens that come as the pointer says are *hits*,
whether they were guessed or not. They say when a guess is worth its price. Under a grammar some
tokens are forced: these guesses are always right.

What this file keeps. A guess changes no token: `Scheduler.commit` takes what the sampler says. So
what is guessed may depend on the clock. And a text of one client is never looked up for another.

Where next: `Scheduler.plan`, which asks, and `Scheduler.commit`, which decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sched import Plan, Request

MOST = 7  # so many tokens of an answer are guessed at a time, unless the engine is told otherwise
PAUSE = 16  # after many guesses that were all wrong, so many hits in a row are asked for
AT_FIRST = 0.7  # how likely the first hit of an answer is taken to be
NEWEST = 0.2  # the weight of the newest token in how often there are hits
FORGET = 0.02  # and of the newest step in what steps cost


class Text:
    """The tokens of a text, and where it went on behind each pair of them the last time."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.behind: dict[tuple[int, int], int] = {}

    def add(self, token: int) -> None:
        if self.tokens:
            self.behind[self.tokens[-1], token] = len(self.tokens) + 1
        self.tokens.append(token)


class Hints:
    """What may follow in one answer.

    `grammar`: where the answer stands in its grammar, if it has one (`parts/text/grammar.py`).
    """

    def __init__(self, grammar: Any = None):
        self.text: Text | None = None  # prompt and answer, once there is a token to guess
        self.hits = 0  # so many tokens in a row came as the pointer says
        self.need = 1  # so many are asked for before a guess
        self.rate = AT_FIRST  # how often there are hits
        self._grammar = grammar
        self._earlier: Text | None = None  # of the same client
        self._source: Text | None = None  # where the pointer stands
        self._at = 0  # the token there may come next
        self._read = 0  # so many tokens of the answer have been read
        self._guessed: int | None = None  # the first token of the newest guess
        self._unforced = 0  # so many tokens in a row were not forced

    def begin(self, prompt: Sequence[int], earlier: Text | None) -> None:
        self.text = Text()
        self._earlier = earlier
        self._push(prompt)
        self.rate = AT_FIRST

    def follow(self, answer: Sequence[int]) -> None:
        """Read the tokens that are new in an answer."""
        new = answer[self._read :]
        if new and self._guessed is not None:
            is_right = new[0] == self._guessed
            self.need = 0 if is_right else min(2 * self.need or 1, PAUSE)
            self._guessed = None
        self._read = len(answer)
        self._push(new)

    def _push(self, tokens: Iterable[int]) -> None:
        text = self.text
        for token in tokens:
            if self._source is not None:
                is_hit = self._source.tokens[self._at] == token
                self.rate += NEWEST * (is_hit - self.rate)
                self.hits = self.hits + 1 if is_hit else 0
                self._at += 1
                if not is_hit or self._at == len(self._source.tokens):
                    self._source = None
            if self._source is None and text.tokens:
                self._point((text.tokens[-1], token))
            text.add(token)

    def _point(self, pair: tuple[int, int]) -> None:
        for text in (self.text, self._earlier):
            if text is not None and text.behind.get(pair, len(text.tokens)) < len(text.tokens):
                self._source = text
                self._at = text.behind[pair]
                return

    @property
    def may_follow(self) -> bool:
        """May there be a guess behind the token that comes next?

        A grammar that forces nothing for a while is asked again now and then.
        """
        if self._grammar is not None and (self._unforced < PAUSE or self._read % PAUSE == 0):
            return True
        return self.need == 0 or (self._source is not None and self.hits >= self.need - 1)

    def forced(self, most: int) -> list[int]:
        """The tokens that the grammar forces."""
        tokens = [] if self._grammar is None else self._grammar.forced()
        self._unforced = 0 if tokens else self._unforced + 1
        return tokens[:most]

    def guess(self, most: int) -> list[int]:
        """The tokens at the pointer."""
        if self._source is None:
            return []
        return self._source.tokens[self._at : self._at + most]

    def note(self, guess: Sequence[int]) -> None:
        """This was guessed."""
        self._guessed = guess[0]


class Guesses:
    """What is guessed in an engine's steps: the scheduler calls it (`sched.Guess`).

    `most`: so many tokens of each answer, whatever they cost. None: where they pay.
    """

    def __init__(self, most: int | None = None):
        if most is not None and most < 0:
            raise ValueError(f"guesses = {most}, but it must be at least 0")
        self.most = most
        self._texts: dict[int, tuple[str, Text]] = {}  # by slot: whose text it had last
        # A step takes so many seconds, and so many more for each of its rows.
        self._step_s = self._row_s = 0.0
        self._sums = [0.0] * 5  # of steps, rows, rows squared, seconds, rows times seconds
        self._last = 0.0  # when the newest step was read

    def __call__(self, decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
        guesses = {}
        rows = len(decoding)
        expected = float(rows)  # tokens of this step
        for request in decoding:
            # A guess follows the newest token, so all tokens must have been read.
            hints = self._follow(request) if request.planned == request.committed else None
            most = min(left, request.max_tokens - request.planned - 1, self.most or MOST)
            if hints is None or most < 1:
                continue
            forced = hints.forced(most)
            guess = forced
            rate = 1.0
            if not forced and (self.most is not None or hints.hits >= hints.need):
                guess = hints.guess(most)
                rate = hints.rate
            if self.most is None:
                guess = guess[: self._paying(rate, len(guess), rows, expected)]
            if not guess:
                continue
            if not forced:
                hints.note(guess)
            guesses[request.id] = tuple(guess)
            left -= len(guess)
            rows += len(guess)
            expected += sum(rate ** (i + 1) for i in range(len(guess)))
        return guesses

    def _paying(self, rate: float, count: int, rows: int, expected: float) -> int:
        """How many of these guesses bring more tokens a second than the step has without them?

        A guess is right if all before it are. With a chance of c for one token more, a row more
        pays if (expected + c) / (seconds + a row's) is above expected / seconds.
        """
        chance = 1.0
        for i in range(count):
            chance *= rate
            if chance * (self._step_s + self._row_s * rows) <= self._row_s * expected:
                return i
            rows += 1
            expected += chance
        return count

    def may_follow(self, plan: Plan) -> bool:
        """May the next step have guesses, if the tokens of this one are read before?"""
        return any(self._may_follow(member.request) for member in plan.emitters)

    def _may_follow(self, request: Request) -> bool:
        if request.max_tokens - request.planned < 2:
            return False
        hints = self._follow(request)
        return hints is not None and (self.most is not None or hints.may_follow)

    def _follow(self, request: Request) -> Hints | None:
        """What may follow in this answer, as far as it has been read."""
        hints = request.hints  # another thread may end the request meanwhile
        if hints is None or request.slot is None:
            return None
        if hints.text is None:
            client, text = self._texts.pop(request.slot, ("", None))
            is_known = bool(request.client) and request.shares
            hints.begin(request.prompt, text if is_known and client == request.client else None)
            if is_known:
                self._texts[request.slot] = request.client, hints.text
        hints.follow(request.answer)
        return hints

    def learn(self, plan: Plan, read: float) -> None:
        """This step was read at this moment: what do a step and a row cost?

        Of late, as it were: a line through the newest steps, without those that read a prompt.
        """
        seconds = read - max(self._last, plan.at)
        self._last = read
        if plan.chunks or self.most is not None:
            return
        rows = len(plan.decodes) + plan.guessed
        newest = (1, rows, rows * rows, seconds, rows * seconds)
        self._sums = [(1 - FORGET) * a + b for a, b in zip(self._sums, newest, strict=True)]
        n, r, rr, s, rs = self._sums
        usual = s / n
        spread = n * rr - r * r
        # As long as all steps had as many rows, a row is taken to cost a tenth of a step.
        slope = (n * rs - r * s) / spread if spread > 0.5 * n else 0.1 * usual
        self._row_s = min(max(slope, 0.02 * usual), usual)
        self._step_s = max(usual - self._row_s * r / n, 0.0)
