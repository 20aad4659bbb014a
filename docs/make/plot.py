"""Plot the results of a benchmark's parts `decode` and `open`.

    python bench.py --shape 15m --vs mlx-lm --parts decode,open --json run.json
    python docs/make/plot.py run.json run.svg

The plot in docs/: python docs/make/plot.py docs/bench-open.json docs/bench-open.svg
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base.atomic_write import write_whole
from benchmarks.report import Summary, load_data, summarise

COLOURS = {
    "continuous": "#2f8f5b",
    "static": "#c27c1a",
    "serial": "#a3599f",
    "mlx-lm": "#3d7fc4",
    "llama": "#c4473d",
}
GREY = "#7d858d"  # legible on white and on black


def draw(records: Sequence[dict]) -> str:
    """Return an SVG with a panel for each part that has a curve. It is transparent, so the page's
    background shows."""
    curves = defaultdict(lambda: defaultdict(list))
    for (part, x, name, who), figure in summarise(records).items():
        if (part, name) in (
            ("decode", "decode tokens/s"),
            ("open", "TTFT p95 ms"),
        ) and x != "load inf":
            curves[part, f"{name}, by {x.split()[0]}"][who].append((float(x.split()[1]), figure))
    if not curves:
        raise ValueError(
            "there is nothing to plot: decode and open can be drawn, and neither has been measured"
        )
    panels = [
        panel(title, curves[part, title], part == "open", 430 * i)
        for i, (part, title) in enumerate(curves)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {430 * len(panels)} 300" font-size="12" '
        f'font-family="system-ui, sans-serif" fill="{GREY}">\n' + "\n".join(panels) + "\n</svg>\n"
    )


def panel(title: str, curves: dict[str, list[tuple[float, Summary]]], log: bool, left: int) -> str:
    """Return a panel: the axes, and a curve of medians for each contestant with thick lines from the lowest
    sample to the highest."""
    xs = sorted({x for curve in curves.values() for x, _ in curve})
    marks = ticks(
        [value for curve in curves.values() for _, figure in curve for value in figure], log
    )
    scale = math.log if log else float

    def across(x: float) -> str:
        return f"{left + 60 + 340 * (x - xs[0]) / (xs[-1] - xs[0] or 1):.1f}"

    def down(y: float) -> str:
        return (
            f"{260 - 190 * (scale(y) - scale(marks[0])) / (scale(marks[-1]) - scale(marks[0])):.1f}"
        )

    parts = [f'<text x="{left + 16}" y="18" font-size="14">{title}</text>']
    for mark in marks:
        parts.append(
            f'<path d="M{left + 56} {down(mark)}h348" stroke="{GREY}" stroke-opacity="0.3"/>'
        )
        parts.append(
            f'<text x="{left + 50}" y="{down(mark)}" dy="4" text-anchor="end">{mark:,g}</text>'
        )
    parts += [f'<text x="{across(x)}" y="280" text-anchor="middle">{x:g}</text>' for x in xs]
    for i, (who, curve) in enumerate(curves.items()):
        colour = next((value for word, value in COLOURS.items() if word in who), GREY)
        points = " ".join(f"{across(x)},{down(figure.median)}" for x, figure in curve)
        spreads = "".join(
            f"M{across(x)} {down(figure.low)}V{down(figure.high)}" for x, figure in curve
        )
        place = f'x="{left + 16 + 200 * (i % 2)}" y="{36 + 15 * (i // 2)}"'
        parts.append(f'<text {place} fill="{colour}">{escape(who)}</text>')
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<path d="{spreads}" stroke="{colour}" stroke-width="6" stroke-linecap="round" opacity="0.6"/>'
        )
    return "\n".join(parts)


def ticks(values: Sequence[float], log: bool) -> list[float]:
    """Return round numbers for an axis: from zero to at least the largest value (370 -> 0, 100, ... 400), or
    powers of ten for a logarithmic axis."""
    if log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return [10.0**e for e in range(low, max(high, low + 1) + 1)]
    tenth = 10 ** math.floor(math.log10(max(values)))
    step = next(tenth * factor for factor in (0.2, 0.5, 1, 2) if max(values) <= 5 * tenth * factor)
    return [step * i for i in range(math.ceil(max(values) / step) + 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Return an exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if len(given) != 2:
            raise ValueError("name two files: python docs/make/plot.py run.json run.svg")
        source, out = given
        write_whole(out, draw(load_data(source)["records"]))
    except (ValueError, OSError) as error:
        print(f"docs/make/plot.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
