"""What the README promises is there."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import ask
import bench
import serve
import tui
from measure.report import number, summarise
from parts.model.families import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RIGHT = (ROOT / "docs" / "right.md").read_text()
FILES = (ROOT / "docs" / "files.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()
MODULES = [str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.py"), *ROOT.glob("parts/*.py"), *ROOT.glob("screen/*.py"))]


def test_every_file_that_the_readme_names_exists():
    names = set(re.findall(r"`((?:\w+/)?\w+\.py)`", README + FILES))
    assert {"nanobatch.py", "kv.py", "sched.py", "tests/test_parity.py"} <= names
    assert all((ROOT / name).exists() for name in names)


def test_the_readme_can_be_read_in_one_sitting():
    assert len(README.splitlines()) <= 170


def test_the_readme_says_how_long_each_file_is():
    """Within a tenth, so that not every patch has to count."""
    counts = re.findall(r"^\| `((?:\w+/)?\w+\.py)` \| ([\d,]+) \|", README + FILES, re.MULTILINE)
    assert len(counts) >= 8
    for name, lines in counts:
        assert len((ROOT / name).read_text().splitlines()) == pytest.approx(int(lines.replace(",", "")), rel=0.1), name


def test_every_place_that_answers_a_question_exists():
    for name in re.findall(r"`((?:Scheduler|Engine|Runner|Flight|Window)\.\w+)`", README):
        owner, method = name.split(".")
        texts = [(ROOT / name).read_text() for name in MODULES]
        assert any(f"class {owner}" in text and f"def {method}(" in text for text in texts), name


def test_every_module_is_in_the_reading_path():
    assert all(f"`{name}`" in README + FILES for name in MODULES)


def test_every_page_that_another_one_leads_to_is_there():
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("exercises/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_every_flag_in_the_readme_is_understood():
    commands = re.findall(r"python ask\.py ((?:.*\\\n)*.*)", README)
    flags = {flag for command in commands for flag in re.findall(r"--[a-z-]+", command)}
    assert {"--model", "--max-tokens"} <= flags
    for flag in flags - {"--help"}:
        ask.parse_arguments([flag, "1"])


def test_every_command_for_the_screen_in_the_readme_is_understood():
    text = README + " ".join(FILES.split())
    commands = re.findall(r"(?<!')python tui\.py([^\n`]*)", text)  # not where it is an argument
    assert len(commands) >= 3
    for command in commands:
        tui.parse_arguments(shlex.split(command.partition("#")[0]))


def test_every_command_for_the_server_in_the_readme_is_understood():
    commands = re.findall(r"python serve\.py([^\n`]*)", README)
    assert len(commands) >= 1
    for command in commands:
        serve.parse_arguments(shlex.split(command))
    flags = set(re.findall(r"`(--[a-z-]+)`", README.split("## Over HTTP")[1].split("\n## ")[0]))
    for flag in flags:
        serve.parse_arguments([flag, "1"])
    assert "--api-key" in flags


def test_every_command_for_the_benchmark_in_the_readme_is_understood(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "obstacle", lambda peer: None)  # a peer need not be installed to be named
    for checkout in (tmp_path / "now", tmp_path / "before"):  # the pages compare two that lie side by side
        (checkout / "docs").mkdir(parents=True)
        (checkout / "bench.py").touch()
    monkeypatch.chdir(tmp_path / "now")
    commands = re.findall(r"python bench\.py([^\n`]*)", SPEED)
    assert len(commands) >= 5
    for command in commands:
        bench.parse_arguments(shlex.split(command.partition("#")[0]))


# The tables of docs/speed.md: file, part, figure, what a line is for, and the contestants, of whom the first is ours.
OURS = "nanobatch continuous"
TABLES = [
    ("15m", "decode", "decode tokens/s", "rows", [OURS, "mlx-lm", "llama.cpp", "../before"]),
    ("15m", "decode", "prefill ms", "rows", [OURS, "mlx-lm", "llama.cpp", "../before"]),
    ("15m", "closed", "total tokens/s", "users", [OURS, "mlx-lm", "llama.cpp", "../before"]),
    ("15m", "closed", "TTFT mean ms", "users", [OURS, "mlx-lm", "llama.cpp", "../before"]),
    ("135m", "decode", "decode tokens/s", "rows", [OURS, "mlx-lm", "../before"]),
]


def table_of_speeds(name: str, part: str, figure: str, unit: str, contestants: list[str]) -> str:
    """The table as the page must have it: of each contestant the median, and ours divided by it."""
    found = summarise(json.loads((ROOT / "docs" / f"bench-{name}.json").read_text())["records"])
    counts = sorted(int(x.split()[1]) for at, x, what, who in found if (at, what, who) == (part, figure, OURS))
    lines = [f"| {unit} | nanobatch | " + " | ".join(f"{who} | ratio" for who in contestants[1:]) + " |"]
    lines += ["|---:" * (2 * len(contestants)) + "|"]
    for count in counts:
        ours, *others = (found[part, f"{unit} {count}", figure, who].median for who in contestants)
        cells = [number(ours)]
        for other in others:
            cells += [number(other), f"{ours / other:.2f}"]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@pytest.mark.parametrize("table", TABLES)
def test_every_table_of_speeds_is_made_from_the_committed_results(table):
    assert table_of_speeds(*table) in SPEED


# The README's table: the beginning of a line, and where its figures are.
TABLE = {
    "15M parameters, one row": ("15m", "decode", "rows 1", "decode tokens/s", "mlx-lm"),
    "15M, 8 rows |": ("15m", "decode", "rows 8", "decode tokens/s", "mlx-lm"),
    "15M, 8 users in a closed": ("15m", "closed", "users 8", "total tokens/s", "mlx-lm"),
    "15M, 8 users, mean time": ("15m", "closed", "users 8", "TTFT mean ms", "mlx-lm"),
    "135M, 8 rows": ("135m", "decode", "rows 8", "decode tokens/s", "mlx-lm"),
    "15M, 8 rows, llama.cpp": ("15m", "decode", "rows 8", "decode tokens/s", "llama.cpp"),
}


def test_the_readmes_table_of_speeds_is_in_the_committed_results():
    lines = re.findall(r"^\| (\d+M.*)\|$", README.split("## How fast it is")[1].split("\n## ")[0], re.MULTILINE)
    assert len(lines) == len(TABLE)
    for line, (begins, (name, part, x, figure, peer)) in zip(lines, TABLE.items(), strict=True):
        table = summarise(json.loads((ROOT / "docs" / f"bench-{name}.json").read_text())["records"])
        ours, theirs = (table[part, x, figure, who].median for who in (OURS, peer))
        wanted = [number(ours), number(theirs), f"{ours / theirs:.2f}"]
        assert line.startswith(begins) and [cell.strip() for cell in line.split("|")[1:]] == wanted, (line, wanted)


def test_every_picture_in_the_readme_is_there_and_shows_text():
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert len(pictures) >= 2
    for picture in [*pictures, *(f"docs/{name}" for name in re.findall(r"!\[.+?\]\((.+?)\)", SPEED))]:
        assert (ROOT / picture).read_text().count("<text") > 5


def test_the_readmes_python_runs_as_printed(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {})
    assert "ttft_s" in capsys.readouterr().out


def test_ci_runs_the_readmes_install_and_test_commands_as_printed():
    (command,) = re.findall(r"^(python3 -m venv .* && python -m pytest)$", README, re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_the_readmes_counts_are_those_of_the_tests():
    import company
    import test_exact
    import test_parity

    compared, own = test_parity.count()
    for page in (README, RIGHT):
        assert f"{len(test_parity.CONFIGS)} configurations" in page
        assert f"{compared} prompts" in page
        assert f"{test_exact.SCHEDULES} random schedules" in page and f" {test_exact.ELSEWHERE} on each other" in page
        assert f"{len(company.SHAPES)} shapes of models" in page
    assert f"({own} of the eight" in README and f"{own} of them of the" in RIGHT


def test_what_the_pages_count_is_so():
    import crowd
    import test_exact
    import test_house
    import test_rows
    import test_sched

    from screen.room import Settings

    tests = test_exact.test_a_planted_bug_is_caught, test_exact.test_a_bug_that_lets_the_company_show_is_caught
    bugs = sum(len(mark.args[1]) for test in tests for mark in test.pytestmark)
    assert f"{bugs} planted bugs" in RIGHT and f"catches {len(test_rows.BUGS)} more" in RIGHT
    assert f"{test_sched.SCHEDULES:,} random schedules" in README
    assert f"`b` sends {Settings().burst} prompts" in README
    assert f"{len(crowd.KINDS)} models, tokens and bits" in (ROOT / "docs" / "machines.md").read_text()
    lengths = {n.name: n.end_lineno - n.lineno + 1 for name in ("ask", "nanobatch") for n in tops(name)}
    first, last = (next(n for n in tops("nanobatch") if n.name == name) for name in ("forward", "attention"))
    assert within_a_tenth("`nanobatch.py`, `forward`", last.end_lineno - first.lineno)
    assert within_a_tenth("`nanobatch.py`, `Runner`, `Engine.step`", lengths["Runner"] + lengths["Engine"])
    assert within_a_tenth("`ask.py`, `main`", lengths["main"])
    code = {name: test_house.lines_of_code(test_house.source(name)) for name in ("kv", "sched", "nanobatch")}
    assert int(re.search(r"(\d+) lines of code:", README)[1]) == pytest.approx(sum(code.values()) + 40, rel=0.05)
    assert int(re.search(r"about (\d+) lines of code", README)[1]) == pytest.approx(code["kv"], rel=0.05)


def tops(name: str) -> list:
    """The functions and classes of a file."""
    nodes = ast.parse((ROOT / f"{name}.py").read_text()).body
    return [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def within_a_tenth(place: str, lines: int) -> bool:
    return int(re.search(rf"\| {re.escape(place)} \| (\d+) \|", README)[1]) == pytest.approx(lines, rel=0.1)


def test_the_readme_names_every_family():
    (line,) = re.findall(r"^Families: (.+?)\(", README, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == set(FAMILIES)
