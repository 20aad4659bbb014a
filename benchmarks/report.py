"""Tables of the samples for a terminal: medians, with the lowest and the highest value in brackets."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.metrics import OF_ALL, OF_ONE, READ
from benchmarks.plan import PARTS


class Summary(NamedTuple):
    median: float
    low: float
    high: float


Key = tuple[str, str, str, str]  # part, x, figure, contestant


def summarise(records: Iterable[dict]) -> dict[Key, Summary]:
    samples = defaultdict(list)
    for r in records:
        for name, value in r["figures"].items():
            samples[r["part"], r["x"], name, r["contestant"]].append(value)
    return {
        key: Summary(statistics.median(values), min(values), max(values))
        for key, values in samples.items()
    }


def load_data(path: str) -> dict:
    """Load a file of `bench.py --json`. Raise ValueError for any other file."""
    try:
        data = json.loads(Path(path).read_text())
        summarise(data["records"])
        data["machine"] = dict(data["machine"])
        data["command"] = str(data["command"])
        return data
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        why = "is a different kind of file"
    raise ValueError(f"{path!r} {why}; name a file that --json wrote")


def compared_with(key: Key, known: Iterable[Key]) -> Key:
    """Return the key of the same figure in the first column that has it, usually ours."""
    return next(other for other in known if other[:3] == key[:3])


def cell_text(key: Key, table: dict[Key, Summary]) -> str:
    """Format a cell: "12.3 (11.9–12.8) ×1.25"; empty if the column lacks the figure."""
    if key not in table:
        return ""
    figure = table[key]
    text, low, high = map(number, figure)
    if low != high:
        text += f" ({low}–{high})"
    first = compared_with(key, table)
    if first != key and table[first].median:
        text += f" ×{figure.median / table[first].median:.2f}"
    return text


def number(value: float) -> str:
    """Format three significant digits: 1234.5 -> '1,234', 12.345 -> '12.3', 0.012345 -> '0.0123'."""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def bandwidth_line(part: str, x: str, who: str, table: dict[Key, Summary]) -> str:
    """Compare the bandwidth that decode uses with the machine's maximum."""
    read, most, one = (table[part, x, name, who].median for name in (READ, OF_ALL, OF_ONE))
    return f"{read:.1f} GB/s read, {read / most:.0%} of {most:.1f} (one thread: {one:.1f})"


def column_heads(records: Iterable[dict]) -> dict[str, str]:
    """Return each contestant's column heading: its name and the BLAS of its samples."""
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
            label = x
            names = dict.fromkeys(key[2] for key in keys if key[1] == x)
            for name in (name for name in names if name not in (READ, OF_ALL, OF_ONE)):
                cells = [cell_text((part, x, name, who), figures) for who in columns]
                table.add_row(label, name, *cells)
                label = ""
            table.add_section()
        console.print(f"\n{part}: {caption}", table, sep="\n")
        for _, x, name, who in keys:
            if name == READ:
                console.print(f"{x}, {who}: {bandwidth_line(part, x, who, figures)}")
