"""The syllabus and the instructor's notes name every unit, and quote lines that exist."""

import ast
import re
from pathlib import Path

from course.from_zero.stages import STAGES

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "course"
SYLLABUS = (COURSE / "README.md").read_text()
NOTES = (COURSE / "instructors.md").read_text()
GLOSSARY = (ROOT / "GLOSSARY.md").read_text()


def rows(title: str) -> list[list[str]]:
    """Return the cells of each row in a table of units."""
    table = SYLLABUS.partition(f"### {title}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    found = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return found[2:]


def test_syllabus_has_every_unit():
    rungs = {path.stem.partition("_")[0] for path in COURSE.glob("ladder/[0-9]*.py")}
    assert rungs <= {row[0].replace("4½", "4b") for row in rows("The ladder")}
    stages = [row[0] for row in rows("From zero")]
    assert {str(stage.number) for stage in STAGES} <= set(stages)
    exercises = [path.stem.split("_")[1] for path in sorted(COURSE.glob("exercises/test_*.py"))]
    assert [row[0] for row in rows("Exercises")] == exercises
    assert re.findall(r"^## Unit (\d+)", NOTES, re.MULTILINE) == stages


def test_units_name_papers_and_terms_that_are_listed():
    units = [*rows("The ladder"), *rows("From zero"), *rows("Exercises")]
    papers = SYLLABUS.partition("## The papers")[2]
    for _, about, paper, _, _, terms in units:
        for name in re.split("; ", paper):
            short = name.partition(",")[0]
            assert short == "–" or f"| {short} |" in papers, (about, name)
        for term in terms.split("; "):
            assert f"**{term}**" in GLOSSARY or f"**{term}** (" in GLOSSARY, (about, term)


def test_notes_quote_lines_of_the_checks():
    """The notes quote the message that a student sees when a planted mistake fails."""
    for stage in STAGES:
        unit = NOTES.partition(f"## Unit {stage.number}:")[2].partition("\n## ")[0]
        (checks,) = COURSE.glob(f"from_zero/test_{stage.number}_*.py")
        tests = [node for node in ast.parse(checks.read_text()).body if hasattr(node, "args")]
        says = [" ".join((ast.get_docstring(test) or "?").split()) for test in tests]
        quoted = unit.split("✗ ")[1:]
        assert quoted, stage.number
        for line in quoted:
            assert any(line.startswith(each) for each in says), (stage.number, line)
