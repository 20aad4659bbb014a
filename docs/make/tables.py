"""Generate the tables in docs/ from measurements and from the tests.

    python docs/make/tables.py            rewrites stale tables, and lists their pages

A generated table follows a comment, which is invisible on the page:

    <!-- made: speeds bench-15m.json decode "decode tokens/s" -->
    <!-- made: gains bench-speculate-demo.json -->
    <!-- made: counts -->
    <!-- made: sizes -->

`speeds` shows one figure of one part of a benchmark: the median of each contestant, and ours divided by
it. `gains` shows the gain from draft tokens. `counts` shows how much the tests compare. `sizes` calculates
the memory of models on a CPU from their published shapes. So no table is typed by hand, and the prose next
to a table only says "about twice".
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Before the modules of tests/, which may import MLX: `device` must load our product first.
from base.atomic_write import write_whole  # noqa: E402
from benchmarks import report  # noqa: E402
from kernels import device  # noqa: E402, F401  # isort: split

OURS = "nanobatch continuous"
MADE = re.compile(r"(<!-- made: (.+?) -->\n)((?:\|.*\n)*)")


def table(heads: list[str], rows: list[list[str]], left: int = 0) -> str:
    """Return a Markdown table. The first `left` columns are text, the others are numbers."""
    rules = ["---" if column < left else "---:" for column in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rules)}|"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def speeds(file: str, part: str, figure: str) -> str:
    """Return a table with a line for each number of rows or users."""
    records = json.loads((ROOT / "docs" / file).read_text())["records"]
    found = {}
    for (at, x, name, contestant), summary in report.summarise(records).items():
        if (at, name) == (part, figure):
            found.setdefault(x, {})[contestant] = summary.median
    peers = [contestant for contestant in next(iter(found.values())) if contestant != OURS]
    unit = next(iter(found)).split()[0]
    heads = [unit, "nanobatch"]
    for peer in peers:
        heads += [peer, "ratio"]
    rows = []
    for x, medians in found.items():
        row = [x.split()[1], report.number(medians[OURS])]
        for peer in peers:
            row += [report.number(medians[peer]), f"{medians[OURS] / medians[peer]:.2f}"]
        rows.append(row)
    return table(heads, rows)


def gains(*files: str) -> str:
    """Return a table with a line for each text of `bench.py --parts speculate`: the ratios of tokens per
    processor second and of steps with and without draft tokens, and the number of draft tokens accepted."""
    heads = ["text"]
    found: dict[str, list[str]] = {}
    for file in files:
        data = json.loads((ROOT / "docs" / file).read_text())
        kind = file.rpartition("-")[2].removesuffix(".json")
        heads += [f"{kind}: tokens a processor second", "steps", "accepted / drafted"]
        figures = report.summarise(data["records"])
        contestants = list(dict.fromkeys(key[3] for key in figures))
        for x in dict.fromkeys(key[1] for key in figures):
            off, on = (partial(of_line, figures, x, who) for who in contestants)
            row = found.setdefault(x, [x])
            name = "tokens a processor second"
            row.append(f"{on(name) / off(name):.2f}")
            row.append(f"{off('steps') / on('steps'):.2f}")
            row.append(f"{on('accepted'):.0f} / {on('drafted'):.0f}")
    rows = [row + ["–"] * (len(heads) - len(row)) for row in found.values()]
    return table(heads, rows, left=1)


def of_line(figures: dict, x: str, who: str, name: str) -> float:
    return figures["speculate", x, name, who].median


class Published(NamedTuple):
    """The shapes in a model's config.json."""

    D: int
    layers: int
    heads: tuple[int, int, int]  # query heads, key heads, and the size of a head
    hidden: int  # width of the MLP or of an expert
    V: int
    tied: bool
    experts: int = 1
    taken: int = 1

    def weights(self, experts: int) -> int:
        """Return the number of weights of the layers and the head, with this many experts in each layer."""
        H, Hkv, Dh = self.heads
        attention = self.D * Dh * (2 * H + 2 * Hkv)
        layer = attention + 3 * self.D * self.hidden * experts
        return self.layers * layer + self.V * self.D


PUBLISHED = {
    "Qwen2.5-0.5B": Published(896, 24, (14, 2, 64), 4_864, 151_936, True),
    "Llama-3.2-1B": Published(2_048, 16, (32, 8, 64), 8_192, 128_256, True),
    "Llama-3.2-3B": Published(3_072, 28, (24, 8, 128), 8_192, 128_256, True),
    "Llama-3.1-8B": Published(4_096, 32, (32, 8, 128), 14_336, 128_256, False),
    "Qwen3-30B-A3B": Published(2_048, 48, (32, 4, 128), 768, 151_936, False, 128, 8),
}
RATES = (10, 20, 40)  # memory bandwidth, GB/s
# Bytes per weight. With 4 and 8 bits, 64 weights share a scale and an offset of two bytes each.
NBYTES = {4: 4 / 8 + 4 / 64, 8: 8 / 8 + 4 / 64, 16: 2.0}


def sizes() -> str:
    """Return a table of the weights' size, the bytes read per token, and the tokens per second that these
    allow."""
    rows = []
    for name, model in PUBLISHED.items():
        for bits, nbytes in NBYTES.items():
            whole = model.weights(model.experts) + model.V * model.D * (not model.tied)
            gigabytes = [count * nbytes / 1e9 for count in (whole, model.weights(model.taken))]
            speeds = [rate / gigabytes[1] for rate in RATES]
            figures = [report.number(figure) for figure in (*gigabytes, *speeds)]
            rows.append([name, str(bits), *figures])
    heads = ["model", "bits", "weights, GB", "read for a token, GB"]
    return table(heads + [f"tokens/s at {rate} GB/s" for rate in RATES], rows, left=1)


def counts() -> str:
    """Return a table of how much the tests compare, for docs/correctness.md."""
    names = "parity test_batch_invariance random_batches test_matmul test_sched test_group"
    parity, exact, company, product, sched, ranks = map(of_the_tests, names.split())
    prompts, own = parity.count()
    caught = (
        exact.test_a_planted_bug_is_caught,
        exact.test_planted_variance_is_caught,
    )
    bugs = sum(len(mark.args[1]) for test in caught for mark in test.pytestmark)
    rows = {
        "parity: configurations of models": len(parity.CONFIGS),
        "parity: prompts, in random concurrent schedules": prompts,
        "parity: of these, with the families least like a Llama": own,
        "batch invariance: random schedules, with the form of the product that the processor takes": exact.SCHEDULES,
        "batch invariance: shapes of models among them": len(company.SHAPES),
        "batch invariance: planted bugs, all caught": bugs,
        "matrix product: planted bugs, all caught": len(product.BUGS),
        "scheduler: random schedules, checked after every step": sched.SCHEDULES,
        "ranks over MPI (not in the suite): models": len(ranks.KINDS),
    }
    return table(["", "how many"], [[what, f"{many:,}"] for what, many in rows.items()], left=1)


def of_the_tests(name: str):
    """Import a module of tests/ by its name, from any folder."""
    (path,) = (ROOT / "tests").rglob(f"{name}.py")
    for folder in (ROOT / "tests", ROOT / "tests" / "lib", path.parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(name)


MAKERS: dict[str, Callable[..., str]] = {
    "speeds": speeds,
    "gains": gains,
    "counts": counts,
    "sizes": sizes,
}


def made_anew(page: str) -> str:
    """Return the page with all its tables regenerated."""

    def anew(found: re.Match) -> str:
        maker, *arguments = shlex.split(found[2])
        return found[1] + MAKERS[maker](*arguments)

    return MADE.sub(anew, page)


def pages() -> list[Path]:
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if MADE.search(path.read_text())]


def main() -> None:
    for path in pages():
        text = path.read_text()
        if (anew := made_anew(text)) != text:
            write_whole(path, anew)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
