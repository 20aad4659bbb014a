"""The pictures of the pages: a program makes each of them, and a moving one shows its frames in turn."""

import re
from pathlib import Path
from xml.etree import ElementTree

from rich.text import Text

from docs.make import pictures
from docs.make.pictures import Frame

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"(?:\]\(|src=\"|srcset=\"|`)([\w./-]+\.(?:svg|png))")


def test_pictures_are_made_by_programs():
    """Each file is named in the docstring of pictures.py, or is a plot of a benchmark that is kept."""
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


def test_moving_picture_frames():
    frames = [["stays", "one"], ["stays", "two"], ["stays", "two"], ["stays", "last & end"]]
    svgs = [pictures.exported([Text(line) for line in frame], (12, 2)) for frame in frames]
    drawn = pictures.moving([Frame(svg, 2.5) for svg in svgs], (12, 2))
    root = ElementTree.fromstring(drawn)
    groups = {"".join(group.itertext()): group.get("class") for group in root.findall(".//{*}g")}
    assert groups.keys() == {"stays", "one", "two", "last & end"}
    assert groups["stays"] is None and drawn.count(">stays<") == drawn.count(">two<") == 1

    def css_of(text: str) -> tuple[str, str]:
        name = groups[text].split()[1]
        (rest,) = re.findall(rf"\.{name}{{visibility:(\w+);", drawn)
        (moments,) = re.findall(rf"@keyframes {name}{{(.*?}})}}", drawn)
        return rest, moments

    shown, hidden = "{visibility:visible}", "{visibility:hidden}"
    assert css_of("one") == ("hidden", f"0%{shown}25.00%{hidden}")
    assert css_of("two") == ("hidden", f"0%{hidden}25.00%{shown}75.00%{hidden}")
    assert css_of("last & end") == ("visible", f"0%{hidden}75.00%{shown}")
    assert ".m{animation:10.0s step-end infinite}" in drawn


def test_frame_keeps_colours_and_places():
    svg = pictures.exported([Text.assemble("ab ", ("cd", "#112233 on #445566"))], (8, 1))
    (line,) = pictures.lines_of(svg, classes := {}, 1)
    back, word = (
        next(n for style, n in classes.items() if hue in style) for hue in ("445566", "112233")
    )
    assert f'<path class="{back}" d="M36-19h24v24h-24"/>' in line
    assert f'<text class="{word}" x="36">cd</text>' in line


def test_an_unknown_name_gets_one_line(capsys):
    assert pictures.main(["film"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'film'" in said and "race" in said
