"""Make a folder for students: the stages with their checks, and no answers.

    python course/handout.py ../handout

The folder contains no bodies of our functions for the stages, no hints, and no hidden checks.
course/from_zero/stand_ins.py replaces later stages, and small_llama.py computes the expected
results. The folder needs neither this checkout nor a compiler; its README.md says how to begin.
"""

from __future__ import annotations

import ast
import shutil
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli import options
from course.from_zero.stages import STAGES
from course.from_zero.start import blank_book
from course.overlay import CHAPTERS, ROOT, our_file

FOLDERS = ("base", "cli", "demo/model", "distributed", "engine", "experiments", "kernels", "models")
FOLDERS += ("screen", "server", "text", "web", "benchmarks", "course/from_zero")
FILES = (
    "ask.py",
    "tui.py",
    "serve.py",
    "logprobs.py",
    "policies.py",
    "prefix.py",
    "prompt_lookup.py",
    "sampling_params.py",
    "state_places.py",
    "step_output.py",
    "LICENSE",
)
FILES += (
    "GLOSSARY.md",
    "pyproject.toml",
    "setup.py",
    "build_backend/backend.py",
    "course/__init__.py",
    "course/overlay.py",
    "course/run.py",
)
FILES += ("tests/lib/harness.py", "tests/lib/scheduler_story.py")
# excluded from course/from_zero
ANSWERS = ("hidden*", "work", "grade.py", "rubric.md", "stage.svg", "*.md")
BUILT = ("__pycache__", "*.so", "*.pyc", ".*")


def without_hints(text: str) -> str:
    """Return the text of stages.py with an empty tuple of hints in each task."""
    lines = text.splitlines()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    hints = [call.args[2] for call in calls if ast.unparse(call.func) == "Task"]
    for node in sorted(hints, key=lambda node: -node.lineno):
        margin = lines[node.lineno - 1][: node.col_offset]
        lines[node.lineno - 1 : node.end_lineno] = [f"{margin}(),"]
    return "\n".join(lines) + "\n"


def requirements() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tests = [each for each in extras["test"] if each.startswith(("pytest>", "pytest-t", "numpy"))]
    return "\n".join([*project["dependencies"], *extras["cpu"], *tests]) + "\n"


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in FOLDERS:
        left_out = shutil.ignore_patterns(*BUILT, *(ANSWERS if "course" in name else ()))
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    book = blank_book()
    for chapter in CHAPTERS:
        file = our_file(chapter)
        if file.name in book:
            (folder / file.relative_to(ROOT)).write_text(book[file.name], encoding="utf-8")
    zero = Path("course", "from_zero")
    stages = (ROOT / zero / "stages.py").read_text(encoding="utf-8")
    (folder / zero / "stages.py").write_text(without_hints(stages), encoding="utf-8")
    (folder / "requirements.txt").write_text(requirements())
    page = (ROOT / zero / "handout.md").read_text(encoding="utf-8")
    rows = []
    for stage in STAGES:
        written = ", ".join(f"`{task.name.replace('.', '.py, ', 1)}`" for task in stage.tasks)
        rows.append(f"| {stage.number} | {stage.name} | {stage.minutes} | {written} |")
    page = page.replace("| stages |", "\n".join(rows))
    (folder / "README.md").write_text(page, encoding="utf-8")


def main() -> int:
    parser = options.CommandLine("course/handout.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where: a new folder")
    folder = parser.parse_args().folder
    try:
        make(folder)
    except OSError as error:
        parser.error(f"{folder}: {error.strerror or error}; name a new folder")
    print(f"{folder}: begin with its README.md")
    return 0


if __name__ == "__main__":
    options.run(main)
