"""What the README promises is there."""

import json
import re
import shlex
from pathlib import Path

import pytest

import bench
import nanobatch
import tui

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_file_that_the_readme_names_exists():
    names = set(re.findall(r"`((?:tests/)?\w+\.py)`", README))
    assert {"nanobatch.py", "kv.py", "sched.py", "tests/test_parity.py"} <= names
    assert all((ROOT / name).exists() for name in names)


def test_the_readme_says_how_long_each_file_is():
    """Within a tenth, so that not every patch has to count."""
    counts = re.findall(r"^\| `(\w+\.py)` \| ([\d,]+) \|", README, re.MULTILINE)
    assert len(counts) >= 8
    for name, lines in counts:
        assert len((ROOT / name).read_text().splitlines()) == pytest.approx(int(lines.replace(",", "")), rel=0.1), name


def test_every_place_that_answers_a_question_exists():
    for name in re.findall(r"`((?:Scheduler|Engine|Window)\.\w+)`", README):
        owner, method = name.split(".")
        texts = [path.read_text() for path in ROOT.glob("*.py")]
        assert any(f"class {owner}" in text and f"def {method}(" in text for text in texts), name


def test_every_module_is_in_the_readmes_reading_path():
    assert all(f"`{path.name}`" in README for path in ROOT.glob("*.py"))


def test_every_flag_in_the_readme_is_understood():
    commands = re.findall(r"python nanobatch\.py ((?:.*\\\n)*.*)", README)
    flags = {flag for command in commands for flag in re.findall(r"--[a-z-]+", command)}
    assert {"--model", "--prompt", "--max-tokens"} <= flags
    for flag in flags - {"--help"}:
        nanobatch.parse_arguments([flag, "1"])


def test_every_command_for_the_screen_in_the_readme_is_understood():
    commands = re.findall(r"python tui\.py([^\n`]*)", README)
    assert len(commands) >= 3
    for command in commands:
        tui.parse_arguments(shlex.split(command))


def test_every_command_for_the_benchmark_in_the_readme_is_understood():
    commands = re.findall(r"python bench\.py([^\n`]*)", README)
    assert len(commands) >= 3
    for command in commands:
        bench.parse_arguments(shlex.split(command.partition("#")[0]))


@pytest.mark.parametrize("name", ["bench-15m", "bench-135m"])
def test_every_speed_in_the_readme_is_in_the_committed_results(name):
    """A line such as "| 8 | 605 | 414 | 1.46 |": rows or users, ours, mlx-lm's, and the ratio of the two."""
    table = bench.summarise(json.loads((ROOT / "docs" / f"{name}.json").read_text())["records"])
    rows = set()
    for (part, x, figure, who), ours in table.items():
        if who == "nanobatch continuous" and (part, x, figure, "mlx-lm") in table:
            peer, count = table[part, x, figure, "mlx-lm"], "".join(filter(str.isdigit, x))
            rows.add((count, *map(bench.number, (ours.median, peer.median)), f"{ours.median / peer.median:.2f}"))
    section = README.split(f"docs/{name}.json")[0].rpartition("docs/")[2]
    printed = re.findall(r"^\| (\d+) \|(.+)\|$", section, re.MULTILINE)
    assert len(printed) >= 2
    for count, line in printed:
        cells = [cell.strip() for cell in line.split("|")]
        for ours, peer, ratio in zip(*[iter(cells)] * 3, strict=True):
            assert (count, ours, peer, ratio) in rows, (count, ours, peer, ratio)


def test_every_picture_in_the_readme_is_there_and_shows_text():
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert len(pictures) >= 2
    for picture in pictures:
        assert (ROOT / picture).read_text().count("<text") > 5


def test_the_readmes_python_runs_as_printed(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {})
    assert "ttft_s" in capsys.readouterr().out


def test_ci_runs_the_readmes_install_and_test_commands_as_printed():
    (command,) = re.findall(r"cd nanobatch && (.* && python -m pytest)$", README, re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_the_readmes_counts_are_those_of_the_tests():
    import test_exact
    import test_parity

    assert f"{len(test_parity.CONFIGS)} configurations" in README
    assert f"{len(test_parity.CONFIGS) * test_parity.PROMPTS} prompts" in README
    assert f"{test_exact.SCHEDULES} random schedules" in README
