"""How long a step may take, and how many prompt tokens fit into that time.

The problem. While a long prompt is read, everybody else waits for the steps that read it. A budget in
tokens does not bound that wait: 128 tokens take 10 ms with one model and 2 s with another, and late
tokens of a prompt several times as long as early ones, because each attends to all before it.

The solution. While somebody decodes, a step takes at most `--step-ms`, by default the larger of 200 ms and
four times a step without a chunk. What a step takes is learned from the steps with chunks:

    seconds = pace x (base + token x tokens + look x looks)

`tokens`: computed in the step. `looks`: pairs of a token and a row before it. The three prices are
fitted to the newest few hundred steps, by least squares of the relative error. They begin with a usual
proportion, which counts for little once tokens at several depths have been read. `pace` is the median of
measured / fitted over the newest steps, so that the fit follows at once when other programs take the
cores, and one interrupted step changes nothing. The same prices say when a prompt will have been read.

The invariant: no token depends on any of this. Only an engine whose bits do not depend on the batch has a
step time by default.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from statistics import median
from typing import NamedTuple

from base.validation import whole
from models.forward_cost import ModelCost
from request import Committed, Plan, Request
from sched import UNLIMITED, Scheduler

USUAL_S = 0.2
MOST_MS = 3_600_000  # an hour
TIMES = 4  # a step with a chunk next to one without, at most
LEAST = 4  # prompt tokens of a step, however short it has to be: so many cost little more than one
FORGET = 0.003  # the weight of the newest step in the fit
NEWEST = 9  # steps whose median counts as the present
RECENT = 64  # steps whose mean counts for what is to come: interrupted steps count, too
PRIOR = 0.03  # the weight of the usual proportion, in steps
LOWEST = 0.01  # no price is lower, as a part of the usual one
BASE = 12.0  # what a step costs besides its tokens, in tokens
LOOK = 5.0  # what a multiplication costs in attention, as a multiple of one by weights
ANSWERS = 0.1  # the weight of the newest answer in the mean length
EVERY_S = 0.5
FEW = 3  # steps with chunks before anything is estimated
PART = 0.1  # of a prompt: chunks as deep as that must have been seen
FINER = 8  # estimates go forward until a prompt is longer by an eighth


class Reading(NamedTuple):
    """A prompt and its answer, in steps that are played forward."""

    request: int
    done: float  # prompt tokens
    total: int
    answer: float  # tokens after the first one

    @property
    def unread(self) -> float:
        return self.total - self.done


class StepTime:
    """How long steps take, and how long they may.

    `limit_ms`: as `Engine` takes it. `is_batch_invariant`: there is a limit by default.
    """

    def __init__(
        self, model: ModelCost, limit_ms: int | None = None, is_batch_invariant: bool = True
    ):
        if limit_ms is not None:
            whole("step_ms", limit_ms, 1, MOST_MS)
        self._limit_ms = limit_ms
        self._is_batch_invariant = is_batch_invariant
        products = model.body_products + model.layers * model.taken * model.expert_products
        far = max(1.0, products / max(1.0, LOOK * model.width))
        self._usual = (BASE, 1.0, 1.0 / far)  # the proportion of the three prices
        self._prices = (0.0, 0.0, 0.0)  # of a step, a token, a look, in seconds
        self._is_fitted = True
        # Sums over steps of x seconds and of x x^T, with x = (1, tokens, looks). Both are divided by the
        # square of what such a step usually takes
        self._sums = [0.0] * 3
        self._products = [[0.0] * 3 for _ in range(3)]
        # Of the newest steps with chunks: tokens, looks, seconds
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=RECENT)
        self._pace = 1.0  # the median of measured / fitted
        self._mean_pace = 1.0
        self._answer = math.inf  # tokens that an answer usually has: others wait for its slot
        self._estimated = -math.inf  # when that was
        self._without: deque[float] = deque(maxlen=NEWEST)  # seconds of steps without a chunk
        self._count = 0  # steps with chunks
        self._deepest = 0  # row of a prompt

    @property
    def limit_s(self) -> float:
        """The seconds that a step may take while somebody decodes."""
        if self._limit_ms is not None:
            return self._limit_ms / 1000
        if not self._is_batch_invariant:
            return math.inf
        return max(USUAL_S, TIMES * median(self._without)) if self._without else USUAL_S

    def prompt_tokens(self, requests: Iterable[Request]) -> int:
        """The prompt tokens that fit into the next step if somebody decodes in it (`Scheduler.plan`)."""
        reading = [r.prefilled for r in requests if r.phase == "prefill"]
        rows = [r.next_row for r in requests if r.phase == "decode" and r.has_next]
        return self._fitting(len(rows), sum(rows), max(reading, default=0)) if rows else UNLIMITED

    def _fitting(self, rows: int, looks: float, depth: float) -> int:
        """Prompt tokens at this depth, next to this many decoding rows."""
        limit = self.limit_s
        if not self._count or limit == math.inf:
            return UNLIMITED
        _, token, look = self._fit()
        left = limit / self._pace - self._seconds(rows, looks)
        return max(LEAST, min(UNLIMITED, int(left / (token + look * depth))))

    def learn(self, plan: Plan, done: Committed, seconds: float) -> None:
        """Learn from a step that has been committed."""
        for request in done.ended:
            usual = request.committed if math.isinf(self._answer) else self._answer
            self._answer = usual + ANSWERS * (request.committed - usual)
        if seconds <= 0:  # by a clock that does not move
            return
        if not plan.chunks:
            self._without.append(seconds)
            return
        looks = sum(chunk.tokens * (chunk.start + chunk.stop) / 2 for chunk in plan.chunks)
        looks += sum(decode.position * (1 + len(decode.draft)) for decode in plan.decodes)
        self._deepest = max(self._deepest, *(chunk.stop for chunk in plan.chunks))
        scale = seconds
        if self._count:
            scale = self._seconds(plan.tokens, looks) * self._pace
        self._recent.append((plan.tokens, looks, seconds))
        if self._count >= NEWEST:  # an outlier counts, but not for as much as it took
            seconds = min(max(seconds, scale / 2), 2 * scale)
        x = (1 / scale, plan.tokens / scale, looks / scale)
        keep = 1 - FORGET
        self._sums = [keep * a + b * seconds / scale for a, b in zip(self._sums, x, strict=True)]
        for row, a in zip(self._products, x, strict=True):
            row[:] = [keep * old + a * b for old, b in zip(row, x, strict=True)]
        self._count += 1
        self._is_fitted = False

    def _seconds(self, tokens: float, looks: float) -> float:
        """The fitted seconds of a step, at a pace of 1."""
        base, token, look = self._fit()
        return base + token * tokens + look * looks

    def _fit(self) -> tuple[float, float, float]:
        """The prices, fitted to all steps so far.

        Minimize the sum of ((seconds - fitted) / usual seconds)^2 over steps, and of
        PRIOR x (price / usual - 1)^2 over prices, where the usual prices have the usual proportion.
        """
        if self._is_fitted:
            return self._prices
        v, A, b = self._usual, self._products, self._sums
        three = range(3)
        along = sum(v[i] * b[i] for i in three)
        scale = along / sum(v[i] * A[i][j] * v[j] for i in three for j in three)
        usual = [scale * each for each in v]
        # In usual prices, all numbers are near 1
        left = [[usual[i] * A[i][j] * usual[j] for j in three] for i in three]
        for i in three:
            left[i][i] += PRIOR
        ratios = solved(left, [usual[i] * b[i] + PRIOR for i in three])
        base, token, look = (u * r for u, r in zip(usual, ratios, strict=True))
        self._prices = base, token, look
        fitted = [base + token * tokens + look * looks for tokens, looks, _ in self._recent]
        measured = [seconds for *_, seconds in self._recent]
        ratios = [m / f for m, f in zip(measured, fitted, strict=True)]
        self._pace = median(ratios[-NEWEST:])
        self._mean_pace = sum(measured) / sum(fitted)
        self._is_fitted = True
        return self._prices

    # --- when a prompt will have been read

    def estimates(self, sched: Scheduler, now: float) -> dict[int, float]:
        """As `seconds_left`, but only every EVERY_S: an estimate takes a millisecond."""
        if now - self._estimated < EVERY_S:
            return {}
        self._estimated = now
        return self.seconds_left(sched)

    def seconds_left(self, sched: Scheduler) -> dict[int, float]:
        """By request: the seconds until its prompt has been read, as far as they can be known.

        The steps to come are played forward, with the prices of steps and the scheduler's limits. What
        arrives later is not known.
        """
        found: dict[int, float] = {}
        running = list(sched.running.values())
        reading = [self._reading(r, r.prefilled) for r in running if r.is_reading and r.prefilled]
        if self._count < FEW or not reading:
            return found
        answers = [self._reading(r, r.prefilled) for r in running if r.phase == "decode"]
        waiting = deque()
        for r in islice(sched.waiting.values(), 2 * sched.slots):
            held, _ = sched.prefixes.match(r.prefix.trail, range(sched.slots))
            waiting.append(self._reading(r, held))
        wanted = {each.request for each in reading if self._deepest >= PART * each.total}
        now = 0.0
        while wanted:
            seconds, steps, shares = self._next_steps(reading, answers, sched)
            now += seconds
            reading = [s._replace(done=s.done + steps * shares[s.request]) for s in reading]
            answers = [s._replace(answer=s.answer - steps) for s in answers]
            read = [s for s in reading if s.unread < 0.5]
            found |= {s.request: now for s in read if s.request in wanted}
            wanted -= found.keys()
            reading = [s for s in reading if s.unread >= 0.5]
            answers = [s for s in (*answers, *read) if s.answer >= 0.5]
            while waiting and len(reading) + len(answers) < sched.slots:
                reading.append(waiting.popleft())
        return found

    def _reading(self, r: Request, done: int) -> Reading:
        """An answer is as long as answers usually are. One that is longer already will go on for as long
        again."""
        left = max(self._answer - r.planned, self._answer / 4, r.planned)
        return Reading(r.id, done, len(r.prompt), min(left, r.max_tokens - 1 - r.planned))

    def _next_steps(
        self, reading: Collection[Reading], answers: Collection[Reading], sched: Scheduler
    ) -> tuple[float, float, dict[int, float]]:
        """The seconds and the number of the steps until something ends, or a prompt is so much deeper that
        its tokens cost more; and what a step reads of each prompt."""
        rows = len(answers)
        room = float(max(sched.budget - rows, sched.chunk))
        if rows:
            room = min(room, self._fitting(rows, 0.0, max(s.done for s in reading)))
        shares = allotted(reading, room, sched.chunk)
        steps = min(
            min(s.unread / n, 1 + s.done / FINER / n) for s in reading if (n := shares[s.request])
        )
        steps = min([steps, *(max(1.0, s.answer) for s in answers)])
        looks = sum(shares[s.request] * s.done for s in reading)
        seconds = self._seconds(rows + sum(shares.values()), looks) * self._mean_pace
        return steps * seconds, steps, shares


def allotted(reading: Collection[Reading], room: float, chunk: int) -> dict[int, float]:
    """The tokens of each prompt in a step, as `Scheduler._allot` shares them."""
    oldest, *others = reading
    kept = min(oldest.unread, chunk, room / 2) if others else 0.0
    shares = {}
    for each in sorted(reading, key=lambda each: each.unread):
        if each is oldest:
            kept = 0.0
        shares[each.request] = max(0.0, min(each.unread, chunk, room - kept))
        room -= shares[each.request]
    return shares


def solved(A: list[list[float]], b: list[float]) -> list[float]:
    """The x of at least LOWEST with the least x^T A x - 2 b^T x: what falls below is kept there."""
    kept: set[int] = set()
    while True:
        free = [i for i in range(len(b)) if i not in kept]
        x = [LOWEST] * len(b)
        rows = [[A[i][j] for j in free] for i in free]
        ends = [b[i] - sum(A[i][j] * LOWEST for j in kept) for i in free]
        for i, row in enumerate(rows):  # elimination: A is positive definite
            for j in range(i + 1, len(free)):
                part = rows[j][i] / row[i]
                rows[j] = [a - part * own for a, own in zip(rows[j], row, strict=True)]
                ends[j] -= part * ends[i]
        for i in reversed(range(len(free))):
            known = sum(rows[i][j] * x[free[j]] for j in range(i + 1, len(free)))
            x[free[i]] = (ends[i] - known) / rows[i][i]
        below = {i for i in free if x[i] < LOWEST}
        if not below:
            return x
        kept |= below
