"""Each exercise fails until it is done, passes with a right solution, and fails with a plausible wrong one.

`course/exercises/solutions` has two patches for each. They are applied to copies of the checkout. There
are three copies: one without any solution; one where every second exercise has a right solution and
the others a wrong one; and one the other way round, whose tests run in the long form only. This shows that a wrong
solution fails even next to right ones that pass.
"""

import os
import re
import runpy
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from long_forms import IS_LONG, long_form
from processes import run
from source import PACKAGES

from engine.server_snapshot import RequestRecord
from policies import POLICIES
from screen import app
from screen.draw import layout
from server import openai
from server.metrics import ServerMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "course" / "exercises"
FILES = {path.stem.split("_")[2]: path for path in sorted(FOLDER.glob("test_*.py"))}
EXERCISES = [*FILES]
README = (FOLDER / "README.md").read_text()


def copy_of_the_tree(folder: Path, kinds: dict[str, str]) -> Path:
    """Copy everything that the exercises need, and apply these solutions."""
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    for name in (
        *PACKAGES,
        "cli",
        "server",
        "screen",
        "experiments",
        "benchmarks",
        "tests",
        "course",
        "demo",
    ):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "run")
        )
    for exercise, kind in kinds.items():
        patch = FOLDER / "solutions" / f"{exercise}.{kind}.patch"
        # Keep git from using a repository that contains this folder
        alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        git = ["git", "apply", "-C1", patch]
        done = subprocess.run(git, cwd=folder, env=alone, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name} no longer applies: write it anew\n{done.stderr}"
    return folder


def verdicts(tree: Path) -> dict[str, list[str]]:
    """Return the messages of each exercise's tests: "" for a test that passes, otherwise the failure."""
    options = ["-q", "-p", "no:cacheprovider", "--junitxml=out.xml"]
    done = run("-m", "pytest", "course/exercises", *options, cwd=tree)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said = defaultdict(list)
    for case in ElementTree.parse(tree / "out.xml").iter("testcase"):
        problem = next(
            (part.get("message") for part in case if part.tag in ("failure", "error")), ""
        )
        said[case.get("classname").split("_")[-1]].append(problem)
    assert sorted(said) == sorted(EXERCISES)
    return said


def test_unsolved_exercise_says_what_is_missing(tmp_path):
    """Each test fails with one line, because a traceback does not help a reader who has not started."""
    for exercise, said in verdicts(copy_of_the_tree(tmp_path, {})).items():
        assert all("not done yet: " in message for message in said), (exercise, said)


@pytest.mark.parametrize("right", [EXERCISES[::2], EXERCISES[1::2]], ids=["even", "odd"])
def test_right_and_wrong_solutions(tmp_path, right):
    """A wrong solution is complete, so nothing is reported as missing, but at least one of its tests fails.
    Half of the exercises are solved right, and the others wrong. In the short form, the opposite case only
    checks that the patches apply."""
    kinds = {each: "right" if each in right else "wrong" for each in EXERCISES}
    tree = copy_of_the_tree(tmp_path, kinds)
    if right == EXERCISES[1::2] and not IS_LONG:
        return
    for exercise, said in verdicts(tree).items():
        assert any(said) == (exercise not in right), (exercise, said)
        assert not any("not done yet" in message for message in said), (exercise, said)


@long_form
def test_solutions_keep_the_architecture(tmp_path):
    """Regression: a limit on lines failed the build for everybody who solved exercise 1 correctly.

    The exercise that adds a family is left out, because it also requires a line in the docs.
    """
    kinds = {exercise: "right" for exercise in EXERCISES if exercise != "family"}
    tree = copy_of_the_tree(tmp_path, kinds)
    for path in (*ROOT.glob("*.md"), ROOT / ".gitignore"):
        shutil.copy(path, tree)
    for name in ("docs", "web", "build_backend", ".ci", ".github"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    checks = ["tests/docs/test_architecture.py", "tests/docs/test_project.py"]
    examples = "not python_of and not slots_page"  # these run the engine, which other tests cover
    options = ["-q", "-p", "no:cacheprovider", "-k", examples]
    done = run("-m", "pytest", *checks, *options, cwd=tree, NANOBATCH_LONG="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def exercise_of(name: str, monkeypatch) -> dict:
    monkeypatch.syspath_prepend(FOLDER)
    found = runpy.run_path(str(FILES[name]))
    return {key: what for key, what in found.items() if key.startswith("test_")}


def test_half_done_pane(monkeypatch):
    """Regression: with a name in CHARTS and none in LOWER, the message complained about CHARTS."""
    test = exercise_of("pane", monkeypatch)["test_v_leads_to_the_pane"]
    monkeypatch.setitem(app.PANES, "memory", None)
    with pytest.raises(pytest.fail.Exception, match="CHARTS has no"):
        test()
    monkeypatch.setattr(layout, "CHARTS", (*layout.CHARTS, "memory"))
    with pytest.raises(pytest.fail.Exception, match="LOWER"):
        test()
    monkeypatch.setattr(layout, "LOWER", (*layout.LOWER, "memory"))
    test()


def test_a_policy_is_told_to_people_in_a_sentence(monkeypatch):
    """Regression: a number instead of a sentence passed the test."""
    test = exercise_of("policy", monkeypatch)["test_gentle_fills_a_free_slot_in_mid_answer"]
    gentle = POLICIES["continuous"]._replace(room=lambda free, running: min(1, free))
    monkeypatch.setitem(POLICIES, "gentle", gentle)
    test()
    monkeypatch.setitem(POLICIES, "gentle", gentle._replace(does=1))
    with pytest.raises(pytest.fail.Exception, match="should be a sentence for people"):
        test()


def test_sampler_is_reachable_by_clients(monkeypatch):
    """Regression: all tests passed without the sampler's name in `PLAIN`, so no client could use it."""
    test = exercise_of("sampler", monkeypatch)["test_a_client_may_ask_for_top_a_over_http"]
    monkeypatch.setitem(test.__globals__, "drawn", lambda **options: None)
    with pytest.raises(pytest.fail.Exception, match="is its name in PLAIN"):
        test()
    monkeypatch.setattr(openai, "PLAIN", (*openai.PLAIN, "top_a"))
    test()


def count_as_hung_up(is_one: Callable[[RequestRecord], bool], patch: pytest.MonkeyPatch) -> None:
    """Solve exercise 4: make `ServerMetrics` count the calls for which `is_one` is true."""
    count, text = ServerMetrics.count, ServerMetrics.text

    def count_too(self: ServerMetrics, call: RequestRecord) -> None:
        count(self, call)
        self.found = getattr(self, "found", 0) + is_one(call)

    def text_too(self: ServerMetrics, *args) -> str:
        name = "nanobatch_hung_up_total"
        return f"{text(self, *args)}# TYPE {name} counter\n{name} {getattr(self, 'found', 0)}\n"

    patch.setattr(ServerMetrics, "count", count_too)
    patch.setattr(ServerMetrics, "text", text_too)


@pytest.mark.parametrize(
    ("is_one", "is_right"),
    [
        (lambda call: call.hung_up, True),
        (lambda call: call.reason == "cancelled", False),
        (lambda call: call.status == 499 or call.reason == "cancelled", False),
        (lambda call: call.reason == "cancelled" and call.status != 503, False),
    ],
)
def test_metric_counts_hang_ups(is_one, is_right, monkeypatch):
    """Regression: requests that the server itself cancelled counted, too, and all three tests passed."""
    count_as_hung_up(is_one, monkeypatch)
    failed = [name for name, test in exercise_of("metric", monkeypatch).items() if fails(test)]
    assert bool(failed) != is_right, failed


def fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except AssertionError:
        return True
    return False


def test_every_exercise_names_its_command():
    assert len(EXERCISES) == 5
    for path in FILES.values():
        text = path.read_text()
        command = f"python -m pytest -x course/exercises/{path.name}"
        assert f"    {command}\n" in text
        assert f"({path.name})" in README and f"`{command}`" in README
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text.split('"""')[1]):
            assert (ROOT / name).exists(), (path, name)
