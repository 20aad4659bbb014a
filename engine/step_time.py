"""The time limit of a step, and the number of prompt tokens that fit into it.

The problem. During the prefill of a long prompt, all other requests wait for its steps. A budget in tokens
does not bound this wait: 128 tokens take 10 ms with one model and 2 s with another, and late tokens of a
prompt take several times as long as early ones, because each token attends to all earlier ones.

The solution. While a request decodes, a step takes at most `--step-ms`, by default the larger of 200 ms and
four times a step without a chunk. The cost of a step is learned from the steps with chunks:

    seconds = pace x (base + token x tokens + look x looks)

`tokens`: the number of tokens in the step. `looks`: the number of pairs of a token and an earlier row. The
three coefficients are fitted to the newest few hundred steps, by least squares of the relative error. A prior with
typical proportions matters little once there are tokens at several depths. `pace` is the median of
measured / fitted over the newest steps, so that the estimate adapts quickly when other programs use the
cores, and a single interrupted step changes nothing. The same model predicts the end of a prefill.

The invariant: no token depends on these estimates. So only an engine whose bits do not depend on the batch has
a step limit by default.
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
TIMES = 4  # default limit, as a multiple of a step without a chunk
LEAST = 4  # minimum number of prompt tokens in a step, whatever the limit: they cost little more than one
FORGET = 0.003  # the weight of the newest step in the fit
NEWEST = 9  # number of newest steps that a median covers
RECENT = 64  # number of steps in the mean pace, which predictions use and which includes interrupted steps
PRIOR = 0.03  # the weight of the prior, in steps
LOWEST = 0.01  # the lowest coefficient, as a fraction of the typical one
BASE = 12.0  # the typical fixed cost of a step, relative to the cost of a token
LOOK = 5.0  # the typical cost of a multiplication in attention, relative to one with weights
ANSWERS = 0.1  # the weight of the newest answer in the mean length
EVERY_S = 0.5
FEW = 3  # number of steps with chunks before the first estimate
PART = 0.1  # a prompt is estimated once some chunk has reached this fraction of its length
FINER = 8  # in one stage of the simulation, a prompt's depth grows by at most 1/FINER


class Reading(NamedTuple):
    """A prompt and its answer in a simulation of future steps."""

    request: int
    done: float  # prompt tokens computed
    total: int
    answer: float  # answer tokens left after the first one

    @property
    def unread(self) -> float:
        return self.total - self.done


class StepTime:
    """Estimates step times, and keeps them under a limit.

    `limit_ms`: the engine's `step_ms`. `is_batch_invariant`: if False, there is no limit by default.
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
        self._usual = (BASE, 1.0, 1.0 / far)  # typical proportions of the three coefficients
        self._prices = (0.0, 0.0, 0.0)  # seconds per step, per token, and per look
        self._is_fitted = True
        # Sums over steps of x seconds and of x x^T, with x = (1, tokens, looks), both divided by the
        # square of the step's expected seconds
        self._sums = [0.0] * 3
        self._products = [[0.0] * 3 for _ in range(3)]
        # (tokens, looks, seconds) of the newest steps with chunks
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=RECENT)
        self._pace = 1.0  # the median of measured / fitted
        self._mean_pace = 1.0
        self._answer = math.inf  # mean length of an answer in tokens
        self._estimated = -math.inf  # time of the last estimate
        self._without: deque[float] = deque(maxlen=NEWEST)  # seconds of steps without a chunk
        self._count = 0  # number of steps with chunks
        self._deepest = 0  # the highest row of a prompt in any chunk so far

    @property
    def limit_s(self) -> float:
        """The time limit of a step in seconds, while a request decodes; infinity if there is none."""
        if self._limit_ms is not None:
            return self._limit_ms / 1000
        if not self._is_batch_invariant:
            return math.inf
        return max(USUAL_S, TIMES * median(self._without)) if self._without else USUAL_S

    def prompt_tokens(self, requests: Iterable[Request]) -> int:
        """Return the number of prompt tokens that fit into the next step (`Scheduler.plan`). UNLIMITED if no
        request decodes, no step with a chunk has been measured, or there is no time limit."""
        reading = [r.prefilled for r in requests if r.phase == "prefill"]
        rows = [r.next_row for r in requests if r.phase == "decode" and r.has_next]
        return self._fitting(len(rows), sum(rows), max(reading, default=0)) if rows else UNLIMITED

    def _fitting(self, rows: int, looks: float, depth: float) -> int:
        """Return the number of prompt tokens at this depth that fit into a step with these decoding rows."""
        limit = self.limit_s
        if not self._count or limit == math.inf:
            return UNLIMITED
        _, token, look = self._fit()
        left = limit / self._pace - self._seconds(rows, looks)
        return max(LEAST, min(UNLIMITED, int(left / (token + look * depth))))

    def learn(self, plan: Plan, done: Committed, seconds: float) -> None:
        """Update the estimates with a committed step."""
        for request in done.ended:
            usual = request.committed if math.isinf(self._answer) else self._answer
            self._answer = usual + ANSWERS * (request.committed - usual)
        if seconds <= 0:  # the clock is stopped
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
        if self._count >= NEWEST:  # clip outliers
            seconds = min(max(seconds, scale / 2), 2 * scale)
        x = (1 / scale, plan.tokens / scale, looks / scale)
        keep = 1 - FORGET
        self._sums = [keep * a + b * seconds / scale for a, b in zip(self._sums, x, strict=True)]
        for row, a in zip(self._products, x, strict=True):
            row[:] = [keep * old + a * b for old, b in zip(row, x, strict=True)]
        self._count += 1
        self._is_fitted = False

    def _seconds(self, tokens: float, looks: float) -> float:
        """Return the fitted seconds of a step, at a pace of 1."""
        base, token, look = self._fit()
        return base + token * tokens + look * looks

    def _fit(self) -> tuple[float, float, float]:
        """Return the three coefficients, fitted to the steps with chunks so far, the newest weighted most.

        They minimize the sum of ((seconds - fitted) / expected seconds)^2 over steps, plus the sum of
        PRIOR x (coefficient / typical - 1)^2 over the coefficients. The typical coefficients have the typical
        proportions, scaled to the measured steps.
        """
        if self._is_fitted:
            return self._prices
        v, A, b = self._usual, self._products, self._sums
        three = range(3)
        along = sum(v[i] * b[i] for i in three)
        scale = along / sum(v[i] * A[i][j] * v[j] for i in three for j in three)
        usual = [scale * each for each in v]
        # In units of the typical coefficients, all numbers are near 1
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

    # --- the time left in a prefill

    def estimates(self, sched: Scheduler, now: float) -> dict[int, float]:
        """Return `seconds_left`, or an empty dict within EVERY_S of the last estimate, because an
        estimate takes a millisecond."""
        if now - self._estimated < EVERY_S:
            return {}
        self._estimated = now
        return self.seconds_left(sched)

    def seconds_left(self, sched: Scheduler) -> dict[int, float]:
        """Return the estimated seconds until the end of each prefill, by request.

        Simulate the coming steps with the fitted costs and the scheduler's limits, ignoring requests that
        may arrive later. Requests that cannot be estimated yet are left out.
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
        """Return a request for the simulation. Its answer is expected to reach the mean length, or twice
        its current length if that is more."""
        left = max(self._answer - r.planned, self._answer / 4, r.planned)
        return Reading(r.id, done, len(r.prompt), min(left, r.max_tokens - 1 - r.planned))

    def _next_steps(
        self, reading: Collection[Reading], answers: Collection[Reading], sched: Scheduler
    ) -> tuple[float, float, dict[int, float]]:
        """Simulate a run of identical steps, until a prompt or an answer ends, or a prompt's tokens become more
        expensive. Return its duration in seconds, its number of steps, and the tokens per step of each prompt."""
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
    """Return the tokens of each prompt in a step, divided as in `Scheduler._allot`."""
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
    """Return the x that minimizes x^T A x - 2 b^T x with every x[i] at least LOWEST. Components that would be
    lower are fixed at LOWEST."""
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
