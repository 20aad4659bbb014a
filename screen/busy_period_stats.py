"""Statistics of a busy period: requests, tokens, time, waits, and the share of useful work.

Times are on the engine's clock, which excludes pauses and slow motion. They include interruptions,
except for the makespan, which is the sum of undisturbed step times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.snapshot import RequestView, percentile
from screen.draw.style import number, span
from screen.timeline_columns import Column

Price = Callable[[int, int], float]  # (rows, chunks) -> undisturbed seconds of a step
KEPT = 10_000  # waits and gaps kept per period, for percentiles


@dataclass
class Period:
    """A busy period, from the arrival of its first request to its last token."""

    began: float
    ended: float = 0.0
    first_step: int = 0
    last_step: int = 0
    over: bool = False
    policies: dict[str, None] = field(default_factory=dict)  # in the order in which they ran
    requests: int = 0
    lost: int = 0  # requests that were cancelled or failed
    tokens: int = 0
    useful: int = 0  # slots that did useful work, summed over all steps
    cells: int = 0  # slots × steps
    # (decoding rows, chunks) -> number of steps
    kinds: Counter[tuple[int, int]] = field(default_factory=Counter)
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    # Seconds between consecutive tokens of an answer
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def take_step(self, step: Column) -> None:
        """Add a step.

        A slot decodes in every step, so the gap between its tokens is the time between the ends of
        two steps.
        """
        if self.cells:
            tokens = len(step.view.decode) - len(step.view.ghosts)
            self.gaps.extend([step.ended - self.ended] * tokens)
        self.ended = step.ended
        self.tokens += step.tokens
        self.useful += step.useful
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

    def makespan(self, price: Price) -> float:
        """Return the total seconds of the steps, without interruptions."""
        return sum(many * price(*kind) for kind, many in self.kinds.items())

    @property
    def figures(self) -> dict[str, str]:
        """Return the figures as text by title, except the makespan, which needs step costs."""
        took = self.ended - self.began
        return {
            "policy": ", ".join(self.policies),
            "requests": f"{self.requests:,}",
            "lost": f"{self.lost:,}",
            "tokens": f"{self.tokens:,}",
            "took": span(took),
            "tok/s": number(self.tokens / took if took > 0 else None),
            "TTFT p50": span(percentile(self.ttfts, 0.5)),
            "TTFT p95": span(percentile(self.ttfts, 0.95)),
            "gap p95": span(percentile(self.gaps, 0.95)),
            "slots used": f"{100 * self.useful / self.cells:.0f} %" if self.cells else "–",
        }


def words(period: Period) -> list[str]:
    """Return the figures as phrases, the most important first."""
    figures = period.figures
    ended = f"{figures['requests']} request{'s' * (period.requests != 1)}"
    ended += f" ({figures['lost']} cut short)" if period.lost else ""
    return [
        ended,
        f"{figures['tokens']} tokens",
        figures["took"],
        f"{figures['tok/s']} tok/s",
        f"TTFT p50 {figures['TTFT p50']}",
        f"p95 {figures['TTFT p95']}",
        f"gap p95 {figures['gap p95']}",
        f"slots used {figures['slots used']}",
    ]
