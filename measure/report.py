"""What is shown of the samples: tables in a terminal, and a picture.

What this file keeps. A table shows the median of the samples, and in brackets the lowest and the
highest.

Where next: `docs/speed.md`, whose tables are made of such figures.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from measure.plan import PARTS


class Summary(NamedTuple):
    median: float
    low: float
    high: float


Key = tuple[str, str, str, str]  # part, x, name of the figure, contestant


def summarise(records: Iterable[dict]) -> dict[Key, Summary]:
    samples = defaultdict(list)
    for r in records:
        for name, value in r["figures"].items():
            samples[r["part"], r["x"], name, r["contestant"]].append(value)
    return {
        key: Summary(statistics.median(values), min(values), max(values))
        for key, values in samples.items()
    }


def compared_with(key: Key, known: Iterable[Key]) -> Key:
    """The figure that this one is divided by: of the first column, ours; in `growth` of the first
    line of its kind."""
    part, x, *figure = key

    def is_like(other: Key) -> bool:
        if part != "growth":
            return other[:3] == key[:3]
        other_part, other_x, *other_figure = other
        return other_part == part and other_x.split()[0] == x.split()[0] and other_figure == figure

    return next(filter(is_like, known))


def cell_text(key: Key, table: dict[Key, Summary]) -> str:
    """12.3 (11.9–12.8) ×1.25"""
    if key not in table:
        return ""
    figure = table[key]
    text = number(figure.median)
    low = number(figure.low)
    high = number(figure.high)
    if low != high:
        text += f" ({low}–{high})"
    first = compared_with(key, table)
    if first != key and table[first].median:
        text += f" ×{figure.median / table[first].median:.2f}"
    return text


def number(value: float) -> str:
    """Three significant digits: 1234.5 -> '1,234', 12.345 -> '12.3', 0.012345 -> '0.0123'"""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def column_heads(records: Iterable[dict]) -> dict[str, str]:
    """What stands above each contestant's column: its name, and the BLAS that its samples ran
    on."""
    heads = {}
    for record in records:
        name = record["contestant"]
        heads[name] = f"{name}\nBLAS {record['blas']}" if "blas" in record else name
    return heads


def show(data: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(
        data["command"],
        "; ".join(f"{name} {value}" for name, value in data["machine"].items()),
        sep="\n",
    )
    console.print("median (lowest–highest) ×ratio to the first column", style="dim")
    figures = summarise(data["records"])
    heads = column_heads(data["records"])
    for part, caption in PARTS.items():
        keys = [key for key in figures if key[0] == part]
        if not keys:
            continue
        columns = list(dict.fromkeys(key[3] for key in keys))
        table = Table("", "", *(heads[who] for who in columns))
        for x in dict.fromkeys(key[1] for key in keys):
            for name in dict.fromkeys(key[2] for key in keys if key[1] == x):
                label = x if not table.rows or table.rows[-1].end_section else ""
                table.add_row(
                    label, name, *(cell_text((part, x, name, who), figures) for who in columns)
                )
            table.add_section()
        console.print(f"\n{part}: {caption}", table, sep="\n")


COLOURS = {
    "continuous": "#2f8f5b",
    "static": "#c27c1a",
    "serial": "#a3599f",
    "mlx-lm": "#3d7fc4",
    "llama": "#c4473d",
}
GREY = "#7d858d"  # can be read on white and on black


def draw(records: Sequence[dict]) -> str:
    """An SVG with a panel for each part that has a curve. It has no background, so it takes the
    page's."""
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
    """Axes, and a curve of medians for each contestant, with a thick line from the lowest sample to
    the highest."""
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
    """Round numbers around the values, from zero or, for a logarithmic axis, powers of ten: 370 ->
    0, 100, ... 400"""
    if log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return [10.0**e for e in range(low, max(high, low + 1) + 1)]
    tenth = 10 ** math.floor(math.log10(max(values)))
    step = next(tenth * factor for factor in (0.2, 0.5, 1, 2) if max(values) <= 5 * tenth * factor)
    return [step * i for i in range(math.ceil(max(values) / step) + 1)]
