"""Figures: all that is reported is computed here, from plain times.

What this file keeps. A figure has its name and its unit in one text, as the tables have them.

Where next: `report.py`, which shows them.
"""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nanobatch import Engine, Request, Scheduler
from parts.api.views import StepView
from parts.device.mlx import mx
from parts.model.fit import usual_budget
from policies import POLICIES


@dataclass
class Answer:
    """One request as its user saw it."""

    sent: float
    times: list[float] = field(default_factory=list)  # of its tokens
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.times[0] - self.sent)

    def gaps_ms(self, since: float = -math.inf, until: float = math.inf) -> list[float]:
        """Times between a token and the next, without gaps that lie wholly outside of the given
        span."""
        return [1e3 * (b - a) for a, b in pairwise(self.times) if b > since and a < until]


Figures = dict[str, float]  # by name and unit, as the tables have them


def rank(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed: rank(range(1, 101), 0.95)
    is 95."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def decode_figures(answers: Sequence[Answer], count: int) -> Figures:
    """The rate once all rows have their first token, until one of them has `count` more; and the
    time until then."""
    began = max(a.times[0] for a in answers)
    later = [[t for t in a.times if t > began] for a in answers]
    if not all(later):
        raise ValueError(f"a row ended before all {len(answers)} had begun; give a longer --output")
    ended = min(times[:count][-1] for times in later)
    rate = sum(t <= ended for times in later for t in times) / (ended - began)
    return {"decode tokens/s": rate, "prefill ms": 1e3 * (began - min(a.sent for a in answers))}


def open_figures(answers: Sequence[Answer]) -> Figures:
    began, ended = min(a.sent for a in answers), max(a.times[-1] for a in answers)
    ttft = [a.ttft_ms for a in answers]
    return {
        "total tokens/s": sum(len(a.times) for a in answers) / (ended - began),
        "TTFT mean ms": statistics.mean(ttft),
        **{f"TTFT p{p} ms": rank(ttft, p / 100) for p in (50, 95, 99)},
    }


def closed_figures(answers: Sequence[Answer], users: int) -> Figures:
    """`decode` is the rate of all users together while their answers run; `total` also counts the
    time they wait."""
    gaps = [gap for a in answers for gap in a.gaps_ms()]
    return {
        "decode tokens/s": users
        * statistics.mean(1e3 / statistics.mean(a.gaps_ms()) for a in answers),
        **open_figures(answers),
        "gap mean ms": statistics.mean(gaps),
        "gap p95 ms": rank(gaps, 0.95),
        "gap max ms": max(gaps),
    }


def long_figures(rows: Sequence[Answer], late: Answer, alone: Answer) -> Figures:
    """The rows' gaps before the late prompt was sent, and from then to its first token."""
    began = max(a.times[0] for a in rows)
    calm = statistics.median(gap for a in rows for gap in a.gaps_ms(began, late.sent))
    rough = rank((gap for a in rows for gap in a.gaps_ms(late.sent, late.times[0])), 0.95)
    return {
        "gap undisturbed ms": calm,
        "gap p95 ms": rough,
        "gap p95 / undisturbed": rough / calm,
        "TTFT alone ms": alone.ttft_ms,
        "TTFT ms": late.ttft_ms,
        "TTFT / alone": late.ttft_ms / alone.ttft_ms,
    }


# The last three are Python's
PARTS_OF_A_STEP = ("python", "device", "wait", "plan", "build", "commit")


def step_figures(steps: Sequence[StepView]) -> Figures:
    """Medians. With run-ahead the stages of a step overlap those of the next, so a step's own time
    is its period."""
    seconds = {
        "step ms": [b.ended - a.ended for a, b in pairwise(steps)],
        **{f"{part} ms": [getattr(s, f"{part}_s") for s in steps] for part in PARTS_OF_A_STEP},
        "plan + commit ms": [s.plan_s + s.commit_s for s in steps],
    }
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def plan_figures(slots: int = 64, length: int = 16_000) -> Figures:
    """What planning takes where most is to be compared: all prompts are alike but for their last
    thousand tokens.

    A plan takes as long as the fastest of five: what other programs do to it is not ours.
    """
    prompts, runs = [(*range(length - 1000), *[id] * 1000) for id in range(slots)], []
    for _ in range(5):
        budget = usual_budget(slots, 64)
        sched = Scheduler(slots, length + 1, POLICIES["continuous"], budget=budget)
        seconds = []
        for id, prompt in enumerate(prompts):
            sched.submit(Request(id, prompt, 1, arrived=0.0))
        while sched.waiting or sched.running:
            began = time.perf_counter()
            plan = sched.plan(0.0)
            seconds.append(time.perf_counter() - began)
            sched.commit(plan, [0] * len(plan.emitters), lambda request, token: None, 0.0)
        runs.append(seconds)
    fastest = list(map(min, *runs))
    return {"plan median ms": 1e3 * statistics.median(fastest), "plan max ms": 1e3 * max(fastest)}


def floor_figures(engine: Engine, rows: int, length: int) -> Figures:
    """What the machine would need at best for a step of so many rows, each `length` tokens long.

    A step reads each weight once and each row's keys and values, and multiplies what it has read.
    The longer of the two times is the floor. Both rates are measured here and now, reading on a
    matrix as large as what a step reads, because small weights stay in the processor's caches, and
    the rate of the memory would be no floor for them.
    """
    from mlx.utils import tree_flatten

    c = engine.model.config
    cached = 2 * c.layers * rows * length * c.Hkv * c.Dh  # numbers of the slab
    weights = [
        a
        for _, a in tree_flatten((engine.model.layers, engine.model.head))
        if isinstance(a, mx.array)
    ]
    reads = sum(a.nbytes for a in weights) + cached * engine.model.dtype.size
    # An embedding is looked up, not multiplied with, unless it is the head as well.
    matrices = [
        s
        for name, s in c.tensors().items()
        if len(s) == 2 and (c.tied or "embed_tokens" not in name)
    ]
    flops = 2 * rows * sum(map(math.prod, matrices)) + 2 * cached * c.H // c.Hkv
    bandwidth, thin, square = machine_rates(reads, rows, engine.model.dtype)
    return {
        "reading ms": 1e3 * reads / bandwidth,
        "arithmetic ms": 1e3 * flops / square,
        "floor ms": 1e3 * max(reads / bandwidth, flops / square),
        f"arithmetic at {rows} rows' rate ms": 1e3 * flops / thin,
        "machine GB/s": bandwidth / 1e9,
        f"machine GFLOP/s at {rows} rows": thin / 1e9,
        "machine GFLOP/s at 1024 rows": square / 1e9,
    }


def machine_rates(nbytes: int, rows: int, dtype: mx.Dtype) -> tuple[float, float, float]:
    """Bytes a second through a matrix, FLOP/s of `rows` rows times it, and FLOP/s of two square
    matrices."""
    matrix = mx.random.normal((1024, max(64, nbytes // (1024 * dtype.size)))).astype(dtype)
    one, some, square = (mx.random.normal((n, 1024)).astype(dtype) for n in (1, rows, 1024))
    mx.eval(matrix, one, some, square)

    def best(compute: Callable[[], mx.array]) -> float:
        return min(timeit.repeat(lambda: mx.eval(compute()), number=1, repeat=10))

    read = min(best(lambda: one @ matrix), best(lambda: matrix.sum()))
    return (
        matrix.nbytes / read,
        2 * rows * matrix.size / best(lambda: some @ matrix),
        2 * square.size * 1024 / best(lambda: square @ square),
    )
