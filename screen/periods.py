"""What a busy period came to: requests, tokens, seconds, waits, and how much of the work was
useful.

The problem. When a burst is over, the slots are free and nothing moves. Nothing tells how it went,
nor whether it went better than the one before, which ran under another policy.

What this file keeps. A `Period` takes in steps and ended requests one by one, in bounded memory
however long it lasts. It counts on the engine's clock, so neither a pause nor slow motion changes a
figure; an interruption does. The makespan alone leaves interruptions out. It stands beside the
others, so two legs of a race compare here as they do on its page.

Where next: `state.py`, which keeps the periods.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parts.api.views import RequestView
from screen.ink import fitting, number, shorten, span
from screen.timeline import Column

CLOCK = "On the engine's clock, first arrival to last token; makespan: without interruptions, as in a race."
KEPT = 10_000  # so many waits and gaps of a period are kept for its percentiles


def percentile(values: Iterable[float], part: float) -> float | None:
    """The smallest value that is at least as large as this part of them."""
    ordered = sorted(values)
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else None


@dataclass
class Period:
    """From the first request after a rest to the last token before the next rest."""

    began: float
    ended: float = 0.0
    first_step: int = 0
    last_step: int = 0
    over: bool = False
    policies: dict[str, None] = field(default_factory=dict)  # in the order in which they ran
    requests: int = 0
    lost: int = 0  # of these, cancelled or failed
    tokens: int = 0
    useful: int = 0  # slots that did something for a request, added up over all steps
    cells: int = 0  # all slots of all steps
    # Of steps: (rows that decode, chunks that go in)
    kinds: Counter[tuple[int, int]] = field(default_factory=Counter)
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    # From each token to the next of its answer
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def take_step(self, step: Column) -> None:
        """A slot that decodes does so in every step: its tokens are as far apart as the ends of two
        steps."""
        if self.cells:
            self.gaps.extend(
                [step.ended - self.ended] * (len(step.view.decode) - len(step.view.ghosts))
            )
        self.ended, self.tokens, self.useful = (
            step.ended,
            self.tokens + step.tokens,
            self.useful + step.useful,
        )
        self.first_step = self.first_step or step.step
        self.last_step = step.step
        self.cells += step.steps * len(step.cells)
        self.policies |= {step.view.policy: None}
        self.kinds[len(step.view.decode), len(step.view.prefill)] += 1

    def take_request(self, request: RequestView) -> None:
        self.began = min(self.began, request.arrived)
        self.requests += 1
        self.lost += request.reason in ("cancelled", "error")
        if request.metrics.ttft_s is not None:
            self.ttfts.append(request.metrics.ttft_s)

    def makespan(self, price: Callable[[int, int], float]) -> float:
        """What its steps take undisturbed, if this is the price of one step of each kind."""
        return sum(many * price(*kind) for kind, many in self.kinds.items())

    @property
    def figures(self) -> tuple[str, ...]:
        """As texts, in the order of `FIGURES`, but for the makespan, which needs prices."""
        took = self.ended - self.began
        rate = number(self.tokens / took if took > 0 else None)
        counts = (f"{count:,}" for count in (self.requests, self.lost, self.tokens))
        waits = (
            percentile(self.ttfts, 0.5),
            percentile(self.ttfts, 0.95),
            percentile(self.gaps, 0.95),
        )
        useful = f"{100 * self.useful / self.cells:.0f} %" if self.cells else "–"
        return ", ".join(self.policies), *counts, span(took), rate, *map(span, waits), useful


class Figure(NamedTuple):
    title: str
    width: int
    rank: int  # if room is short, the figures of the highest ranks go
    meaning: str = ""


FIGURES = (
    Figure("policy", 13, 0),
    Figure("requests", 9, 0),
    Figure("lost", 6, 9, " Lost: cancelled or failed."),
    Figure("tokens", 9, 1),
    Figure("took", 9, 0),
    Figure("makespan", 10, 5),
    Figure("tok/s", 8, 2),
    Figure("TTFT p50", 10, 3),
    Figure("TTFT p95", 10, 4),
    Figure("gap p95", 9, 6, " Gap: from a token to the next of its answer."),
    Figure("useful", 8, 7, " Useful: the share of slots × steps that did something for a request."),
)


Price = Callable[[int, int], float]  # of a step with so many rows and so many chunks, undisturbed


def table(
    periods: Sequence[Period], price_in: Callable[[Period], Price | None], width: int, most: int
) -> list[str]:
    """A line for each of the last periods, newest first, under a line of titles.

    `price_in`: what steps cost in a period; None: that cannot be known.
    """
    shown = fitting(FIGURES, max(0, width - 1))
    if not shown:
        return []

    def line(texts: Sequence[str]) -> str:
        pairs = zip(FIGURES, texts, strict=True)
        policy, *cells = [(text, figure.width) for figure, text in pairs if figure in shown]
        return f" {shorten(policy[0], policy[1]):<{policy[1]}}" + "".join(
            f"{text:>{width}}" for text, width in cells
        )

    lines = [line([figure.title for figure in FIGURES])]
    for period in list(periods)[: -most - 1 : -1]:
        *before, took, rate, p50, p95, gap, useful = period.figures
        price = price_in(period)
        makespan = span(period.makespan(price) if price else None)
        lines.append(line([*before, took, makespan, rate, p50, p95, gap, useful]))
    return lines


def explained(width: int) -> str:
    """What the table's figures mean, as far as there is room for them."""
    return CLOCK + "".join(figure.meaning for figure in fitting(FIGURES, width - 1))


def words(period: Period) -> list[str]:
    """The same figures as phrases, the most important first."""
    _, requests, lost, tokens, took, rate, p50, p95, gap, useful = period.figures
    ended = f"{requests} requests" if period.requests != 1 else "1 request"
    ended += f" ({lost} cut short)" if period.lost else ""
    phrases = (
        ended,
        f"{tokens} tokens",
        took,
        f"{rate} tok/s",
        f"TTFT p50 {p50}",
        f"p95 {p95}",
        f"gap p95 {gap}",
    )
    return [*phrases, f"useful {useful}"]
