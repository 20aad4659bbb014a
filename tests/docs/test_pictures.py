"""The pictures in the docs: a program creates each of them, and an animation shows its frames in turn."""

import re
from pathlib import Path

from docs.make import pictures

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"(?:\]\(|src=\"|srcset=\"|`)([\w./-]+\.(?:svg|png))")


def test_pictures_are_made_by_programs():
    """Each file is named in the docstring of pictures.py, or is a plot of a stored benchmark."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("course/**/*.md")]
    shown = {
        (page.parent / name).resolve()
        for page in pages
        for name in SHOWN.findall(page.read_text())
        if (page.parent / name).exists()
    }
    made = {
        ROOT / name for name in re.findall(r"(?:docs|course)/[\w/-]+\.\w{3}\b", pictures.__doc__)
    }
    plots = {path.with_suffix(".svg") for path in ROOT.glob("docs/bench*.json")}
    plots.add(ROOT / "docs" / "bench.svg")
    there = {
        *ROOT.glob("docs/**/*.svg"),
        *ROOT.glob("docs/**/*.png"),
        *ROOT.glob("course/**/*.svg"),
    }
    assert len(shown) >= 8
    assert shown <= made | plots, shown - made - plots
    assert there == {path for path in made | plots if path.exists()}, "nobody makes this one"
    assert made == {path for path in made if path.exists()}


def test_screen_is_drawn(tmp_path):
    """Regression: the program called a function of tui.py that had been renamed."""
    assert pictures.main(["screen", "--out", str(tmp_path)]) == 0
    assert "prefill" in (tmp_path / "screen.svg").read_text()
