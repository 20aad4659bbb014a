"""Compute the reported figures from recorded times. A figure's name ends with its unit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.roofline import measure_roofline
from engine.snapshot import StepView, percentile
from kernels import device
from models.forward_cost import floors_of, of_rows
from nanobatch import Engine, Handle


@dataclass
class Delivery:
    """The times of one request as its user sees them."""

    sent: float
    times: list[float] = field(default_factory=list)  # arrival time of each token
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.times[0] - self.sent)

    def gaps_ms(self, since: float = -math.inf, until: float = math.inf) -> list[float]:
        """Return the gaps between consecutive tokens that overlap the given time span."""
        return [1e3 * (b - a) for a, b in pairwise(self.times) if b > since and a < until]


Figures = dict[str, float]  # name with unit -> value, as in the tables
READ, OF_ALL, OF_ONE = (
    "GB/s read",
    "GB/s of all threads",
    "GB/s of one thread",
)  # figures of `bandwidth_figures`


def decode_figures(answers: Sequence[Delivery], count: int) -> Figures:
    """Return the decode rate and the prefill time before it. The rate is measured from the time when all
    rows have a first token until one of them has `count` more."""
    began = max(a.times[0] for a in answers)
    later = [[t for t in a.times if t > began] for a in answers]
    if not all(later):
        raise ValueError(f"a row ended before all {len(answers)} had begun; give a longer --output")
    ended = min(times[:count][-1] for times in later)
    rate = sum(t <= ended for times in later for t in times) / (ended - began)
    return {"decode tokens/s": rate, "prefill ms": 1e3 * (began - min(a.sent for a in answers))}


def open_figures(answers: Sequence[Delivery]) -> Figures:
    began = min(a.sent for a in answers)
    ended = max(a.times[-1] for a in answers)
    ttft = [a.ttft_ms for a in answers]
    return {
        "total tokens/s": sum(len(a.times) for a in answers) / (ended - began),
        "TTFT mean ms": statistics.mean(ttft),
        **{f"TTFT p{p} ms": percentile(ttft, p / 100) for p in (50, 95, 99)},
    }


def closed_figures(answers: Sequence[Delivery], users: int) -> Figures:
    """Return the figures of a closed loop. `decode` is the rate of all users together while answers run;
    `total` includes waiting."""
    gaps = [gap for a in answers for gap in a.gaps_ms()]
    return {
        "decode tokens/s": users
        * statistics.mean(1e3 / statistics.mean(a.gaps_ms()) for a in answers),
        **open_figures(answers),
        "gap mean ms": statistics.mean(gaps),
        "gap p95 ms": percentile(gaps, 0.95),
        "gap max ms": max(gaps),
    }


def long_figures(rows: Sequence[Delivery], late: Delivery, alone: Delivery) -> Figures:
    """Compare the rows' gaps before the late prompt was sent with the gaps until its first token."""
    began = max(a.times[0] for a in rows)
    calm = statistics.median(gap for a in rows for gap in a.gaps_ms(began, late.sent))
    disturbed = [gap for a in rows for gap in a.gaps_ms(late.sent, late.times[0])]
    rough = percentile(disturbed, 0.95)
    return {
        "gap undisturbed ms": calm,
        "gap p95 ms": rough,
        "gap p95 / undisturbed": rough / calm,
        "TTFT alone ms": alone.ttft_ms,
        "TTFT ms": late.ttft_ms,
        "TTFT / alone": late.ttft_ms / alone.ttft_ms,
    }


def draft_figures(engine: Engine, handles: Sequence[Handle], until: Sequence[Handle]) -> Figures:
    """Step the engine and measure from when all requests decode until those in `until` have finished."""
    while any(handle.request.committed == 0 for handle in handles):
        engine.step()
    before = sum(handle.request.committed for handle in handles)
    began = time.perf_counter()
    spent = time.process_time()
    steps = engine.registry.steps.count
    while not all(handle.finish_reason for handle in until):
        engine.step()
    figures = {
        "tokens": sum(h.request.committed for h in handles) - before,
        "steps": engine.registry.steps.count - steps,
        "drafted": sum(handle.metrics.draft_tokens for handle in handles),
        "accepted": sum(handle.metrics.accepted_tokens for handle in handles),
        "seconds": time.perf_counter() - began,
        "processor seconds": time.process_time() - spent,
    }
    gaps = [gap for h in handles if h not in until for gap in pairwise(h.times)]
    if gaps:
        figures["others' gap ms"] = 1e3 * statistics.median(b - a for a, b in gaps)
    for handle in handles:
        handle.cancel()
    while engine.step():
        pass
    return figures


def sums_of(figures: Sequence[Figures]) -> Figures:
    """Sum counts and seconds over several texts and compute the rates."""
    sums = {name: sum(each[name] for each in figures) for name in figures[0]}
    seconds = sums.pop("seconds")
    spent = sums.pop("processor seconds")
    if "others' gap ms" in sums:
        sums["others' gap ms"] /= len(figures)
    sums["tokens/s"] = sums["tokens"] / seconds
    sums["tokens a processor second"] = sums["tokens"] / spent
    return sums


# `plan`, `build` and `commit` are parts of `python`
PARTS_OF_A_STEP = ("python", "device", "wait", "plan", "build", "commit")


def step_figures(steps: Sequence[StepView]) -> Figures:
    """Return medians over the steps. With run-ahead, the stages of a step overlap with those of the next
    step, so a step's time is measured from the end of the previous step."""
    seconds = {
        "step ms": [b.ended - a.ended for a, b in pairwise(steps)],
        **{f"{part} ms": [getattr(s, f"{part}_s") for s in steps] for part in PARTS_OF_A_STEP},
    }
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def bandwidth_figures(engine: Engine, rows: int, length: int, tokens_per_s: float) -> Figures:
    """Return the memory bandwidth that decode uses (weights, and keys and values of rows of this length), and
    the machine's maximum, measured now with one thread and with all."""
    nbytes = of_rows(engine.model.cost, rows, length).nbytes
    return {
        READ: nbytes * tokens_per_s / rows / 1e9,
        OF_ALL: device.read_rate(2**28, seconds=0.3) / 1e9,
        OF_ONE: device.read_rate(2**28, threads=1, seconds=0.3) / 1e9,
    }


def floor_figures(engine: Engine, rows: int, length: int) -> Figures:
    """Return the roofline's lower bound for a step of this many rows, each `length` tokens long.

    `models/forward_cost.py` counts the bytes and multiplications of the step, and the machine's rates are
    measured now. The larger of the two times is the floor.
    """
    measure_roofline(engine)
    roof = engine.snapshot().roof
    floors = floors_of(of_rows(engine.model.cost, rows, length), roof)
    return {
        "reading ms": 1e3 * floors.reading,
        "arithmetic ms": 1e3 * floors.multiplying,
        "floor ms": 1e3 * floors.longest,
        "machine GB/s": roof.nbytes_per_s / 1e9,
        "machine GFLOP/s": roof.multiplying / 1e9,
    }
