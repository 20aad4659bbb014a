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
from parts.checkpoint import FAMILIES

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


@pytest.mark.parametrize("name", ["bench-15m", "bench-135m", "bench-135m-closed"])
def test_every_table_of_speeds_is_in_the_committed_results(name):
    """A line such as "| 8 | 605 | 414 | 1.46 |": rows or users, ours, mlx-lm's, and the ratio of the two."""
    table = bench.summarise(json.loads((ROOT / "docs" / f"{name}.json").read_text())["records"])
    rows = set()
    for (part, x, figure, who), ours in table.items():
        if who == "nanobatch continuous" and (part, x, figure, "mlx-lm") in table:
            peer, count = table[part, x, figure, "mlx-lm"], "".join(filter(str.isdigit, x))
            rows.add((count, *map(bench.number, (ours.median, peer.median)), f"{ours.median / peer.median:.2f}"))
    section = SPEED.split(f"docs/{name}.json")[0].rpartition("docs/")[2]
    printed = re.findall(r"^\| (\d+) \|(.+)\|$", section, re.MULTILINE)
    assert len(printed) >= 2
    for count, line in printed:
        cells = [cell.strip() for cell in line.split("|")]
        for ours, peer, ratio in zip(*[iter(cells)] * 3, strict=True):
            assert (count, ours, peer, ratio) in rows, (count, ours, peer, ratio)


# What docs/speed.md says in prose, and the figure that it is taken from: file, part, x, figure, contestant,
# and by whose same figure it is divided.
OURS, STATIC, SERIAL, PEER = "nanobatch continuous", "nanobatch static", "nanobatch serial", "mlx-lm"
CLAIMS = {
    "makes 0.50 of its": ("llama", "decode", "rows 1", "decode tokens/s", OURS, "llama.cpp"),
    "row, 0.58 with four": ("llama", "decode", "rows 4", "decode tokens/s", OURS, "llama.cpp"),
    "0.58 with eight": ("llama", "decode", "rows 8", "decode tokens/s", OURS, "llama.cpp"),
    "and 0.60 with sixteen": ("llama", "decode", "rows 16", "decode tokens/s", OURS, "llama.cpp"),
    "within 0.37 s under": ("open", "open", "load 0.8", "TTFT p95 ms", OURS),
    "within 2.0 s under": ("open", "open", "load 0.8", "TTFT p95 ms", STATIC),
    "continuous makes 736 tokens/s": ("open", "open", "load inf", "total tokens/s", OURS),
    "static 500": ("open", "open", "load inf", "total tokens/s", STATIC),
    "serial 135": ("open", "open", "load inf", "total tokens/s", SERIAL),
    "as well, 674": ("open", "open", "load inf", "total tokens/s", PEER),
    "takes 20.7 ms": ("15m", "steps", "rows 8", "step ms", OURS),
    "would take 10.6 ms": ("15m", "steps", "rows 8", "reading ms", OURS),
    "best rate 1.6 ms": ("15m", "steps", "rows 8", "arithmetic ms", OURS),
    "and committing take 0.33 ms": ("15m", "steps", "rows 8", "plan + commit ms", OURS),
    "eight rows take 26.7 ms": ("far", "steps", "rows 8", "step ms", OURS),
    "and 83.7 ms when": ("far", "steps", "rows 8, far", "step ms", OURS),
    "then take 42.6 ms": ("far", "steps", "rows 8, far", "reading ms", OURS),
    "from 0.06 ms": ("growth", "growth", "slots 1", "plan + commit ms", OURS),
    "0.80 ms": ("growth", "growth", "slots 64", "plan + commit ms", OURS),
    "from 19.9 ms": ("15m", "long", "prompt 2000", "gap undisturbed ms", OURS),
    "to 108 ms": ("15m", "long", "prompt 2000", "gap p95 ms", OURS),
    "mlx-lm to 5.0 s": ("15m", "long", "prompt 2000", "gap p95 ms", PEER),
    "token after 3.2 s": ("15m", "long", "prompt 2000", "TTFT ms", OURS),
    "1.3 times as late": ("15m", "long", "prompt 2000", "TTFT / alone", OURS),
    "mlx-lm: after 5.5 s": ("15m", "long", "prompt 2000", "TTFT ms", PEER),
    "runs on it: 52 tokens/s": ("newcomer-mkl", "newcomer", "rows 8", "decode tokens/s", "mlx-lm as installed"),
    "it does 525": ("newcomer-mkl", "newcomer", "rows 8", "decode tokens/s", OURS),
    "10.2 times as many": ("newcomer-mkl", "newcomer", "rows 8", "decode tokens/s", OURS, "mlx-lm as installed"),
    "417, ": ("newcomer-openblas", "newcomer", "rows 8", "decode tokens/s", OURS),
    "8.1 times": ("newcomer-openblas", "newcomer", "rows 8", "decode tokens/s", OURS, "mlx-lm as installed"),
    "one row (1.61 times)": ("openblas", "decode", "rows 1", "decode tokens/s", OURS, PEER),
    "four (1.29)": ("openblas", "decode", "rows 4", "decode tokens/s", OURS, PEER),
    "eight (1.27)": ("openblas", "decode", "rows 8", "decode tokens/s", OURS, PEER),
    "sixteen (1.08;": ("openblas", "decode", "rows 16", "decode tokens/s", OURS, PEER),
    "takes 1.5 times as long for a bare": ("sampling", "sampling", "rows 8", "temperature=1 / greedy", OURS),
    "1.6 times for twenty": ("sampling", "sampling", "rows 8", "logprobs=20 / greedy", OURS),
    "1.4 for a bias": ("sampling", "sampling", "rows 8", "logit_bias of 100,000 tokens / greedy", OURS),
    "1.4 for a top_k of": ("sampling", "sampling", "rows 8", "top_k=40 / greedy", OURS),
    "1.7 for a min_p": ("sampling", "sampling", "rows 8", "min_p=0.1 / greedy", OURS),
    "takes 2.4 times as long as": ("busy", "busy", "rows 8", "beside others / alone", OURS),
    "5.8 for a top_p, the": ("sampling", "sampling", "rows 8", "top_p=0.9 / greedy", OURS),
}
# The other numbers in that prose: what was measured, not what came out.
SETTINGS = "2 3 8 15 16 32 40 64 80 95 128 135 256 512 2,000 2,048 10,000 16,384 100,000 152,000 0.32.2 0.32.4"


# The README's table: the beginning of a line, and where its figures are.
TABLE = {
    "15M parameters, one row": ("15m", "decode", "rows 1", "decode tokens/s", PEER),
    "15M, 8 rows |": ("15m", "decode", "rows 8", "decode tokens/s", PEER),
    "15M, 8 users in a closed": ("15m", "closed", "users 8", "total tokens/s", PEER),
    "15M, 8 users, mean time": ("15m", "closed", "users 8", "TTFT mean ms", PEER),
    "135M, 8 rows": ("135m", "decode", "rows 8", "decode tokens/s", PEER),
    "15M, 8 rows, llama.cpp": ("llama", "decode", "rows 8", "decode tokens/s", "llama.cpp"),
}


def test_the_readmes_table_of_speeds_is_in_the_committed_results():
    lines = re.findall(r"^\| (\d+M.*)\|$", README.split("## How fast it is")[1].split("\n## ")[0], re.MULTILINE)
    assert len(lines) == len(TABLE)
    for line, (begins, (name, part, x, figure, peer)) in zip(lines, TABLE.items(), strict=True):
        table = bench.summarise(json.loads((ROOT / "docs" / f"bench-{name}.json").read_text())["records"])
        ours, theirs = (table[part, x, figure, who].median for who in (OURS, peer))
        wanted = [bench.number(ours), bench.number(theirs), f"{ours / theirs:.2f}"]
        assert line.startswith(begins) and [cell.strip() for cell in line.split("|")[1:]] == wanted, (line, wanted)


def test_every_number_in_the_prose_about_speed_is_in_the_committed_results():
    prose = re.sub(r"```.*?```|^\|.*?$|\]\(.*?\)|`.*?`", "", SPEED, flags=re.DOTALL | re.MULTILINE)
    prose = " ".join(prose.split())
    for printed, (name, part, x, figure, who, *by) in CLAIMS.items():
        table = bench.summarise(json.loads((ROOT / "docs" / f"bench-{name}.json").read_text())["records"])
        value = table[part, x, figure, who].median
        for rival in by:
            value /= table[part, x, figure, rival].median
        digits = re.search(r"\d[\d,]*(\.\d+)?", printed)
        if figure.endswith(" ms") and f"{digits[0]} s" in printed:
            value /= 1000
        places = len((digits[1] or ".")[1:])
        assert prose.count(printed) == 1, printed
        assert abs(float(digits[0].replace(",", "")) - value) <= 0.5 * 10**-places + 1e-9, (printed, value)
        prose = prose.replace(printed, "")
    assert set(re.findall(r"(?<!\w)\d[\d.,]*(?<![.,])", prose)) <= set(re.findall(r"\S+", SETTINGS))


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
    import test_sched

    from screen.room import Settings

    tests = test_exact.test_a_planted_bug_is_caught, test_exact.test_a_bug_in_how_neighbours_share_a_product_is_caught
    bugs = sum(len(mark.args[1]) for test in tests for mark in test.pytestmark)
    assert f"{bugs} planted bugs" in RIGHT
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
