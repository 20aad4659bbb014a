"""What the README promises is there."""

import re
import shlex
from pathlib import Path

import nanobatch
import tui

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_file_that_the_readme_names_exists():
    names = set(re.findall(r"`((?:tests/)?\w+\.py)`", README))
    assert {"nanobatch.py", "kv.py", "sched.py", "tests/test_parity.py"} <= names
    assert all((ROOT / name).exists() for name in names)


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


def test_every_picture_in_the_readme_is_there_and_shows_text():
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert len(pictures) >= 2
    for picture in pictures:
        assert "decode" in (ROOT / picture).read_text()


def test_the_readmes_python_runs_as_printed(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {})
    assert "ttft_s" in capsys.readouterr().out


def test_ci_runs_the_readmes_install_and_test_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    (install,) = re.findall(r"(-e '\.\[cpu,test\]') && python -m pytest", README)
    assert install in ci and "python -m pytest" in ci


def test_the_readmes_counts_are_those_of_the_tests():
    import test_exact
    import test_parity

    assert f"{len(test_parity.CONFIGS)} configurations" in README
    assert f"{len(test_parity.CONFIGS) * test_parity.PROMPTS} prompts" in README
    assert f"{test_exact.SCHEDULES} random schedules" in README
