"""Each mutant of `tests/lib/mutants.py` is a mistake that could be made today, and a test fails with it.

Here the table is only checked. `NANOBATCH_MUTANTS=all`, or a number for a random sample, makes a copy
of the checkout, applies one mutant after the other, and runs its test there.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import CORE, MUTANTS, PLAIN_TEXT, RUNTIME, SCREEN, SERVER, Mutant

from models.memory import CORE as CORE_MODULES

ROOT = Path(__file__).parents[2]
WANTED = os.environ.get("NANOBATCH_MUTANTS", "0")
LIMIT_S = 300  # for one test
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", "build", "*.egg-info"
)


def chosen() -> list[Mutant]:
    if WANTED == "all":
        return MUTANTS
    return random.Random(0).sample(MUTANTS, min(int(WANTED), len(MUTANTS)))


def name_of(mutant: Mutant) -> str:
    return f"{mutant.file}-{MUTANTS.index(mutant)}"


each = pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
long_form = pytest.mark.skipif(WANTED == "0", reason="minutes; NANOBATCH_MUTANTS=all runs it")


@each
def test_a_mutant_can_be_applied(mutant):
    """A table of patches goes stale silently: `old` moves on, and nothing is replaced any more."""
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))


@each
def test_the_test_of_a_mutant_exists(mutant):
    file, _, name = mutant.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    name = name.partition("[")[0]
    assert name in tests if name else any(test.startswith("test_") for test in tests)


def test_every_area_has_its_mutants():
    core = {f"{name}.py" for name in CORE_MODULES} - {"prompt_lookup.py"}
    assert {mutant.file for mutant in CORE} == core
    assert all(mutant.file.startswith("engine/") for mutant in RUNTIME)
    assert all(mutant.file.startswith("server/") for mutant in SERVER)
    assert all(mutant.file.startswith(("text/", "base/")) for mutant in PLAIN_TEXT)
    assert all(mutant.file.startswith(("screen/", "tui.py")) for mutant in SCREEN)
    for mutants, least in ((CORE, 25), (SERVER, 15), (PLAIN_TEXT, 10), (SCREEN, 10)):
        assert len(set(mutants)) >= least


# --- the long form ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mutants") / "checkout"
    return shutil.copytree(ROOT, folder, ignore=NOT_COPIED)


def run_tests(checkout: Path, *tests: str) -> subprocess.CompletedProcess:
    """In the copy, by its own files alone."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-n", "0", *tests]
    env = {**os.environ, "NANOBATCH_MUTANTS": "0"}
    limit = LIMIT_S * len(tests)
    return subprocess.run(
        command, cwd=checkout, env=env, capture_output=True, text=True, timeout=limit
    )


@long_form
def test_without_a_mutant_their_tests_pass(checkout):
    """Else a test that fails anyway would seem to catch everything."""
    tests = sorted({mutant.test for mutant in chosen()})
    done = run_tests(checkout, *tests)
    assert done.returncode == 0, done.stdout[-3000:]


@long_form
@pytest.mark.parametrize("mutant", chosen(), ids=name_of)
def test_a_mutant_is_caught(checkout, mutant):
    path = checkout / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        done = run_tests(checkout, mutant.test)
    finally:
        path.write_text(text)
    assert done.returncode == 1, f"{mutant.test} passes with the mistake\n{done.stdout[-1000:]}"
