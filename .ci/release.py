"""Build the wheel, look into it, and try it. A line says the wheel's name, or each thing that is wrong.

    python .ci/release.py            builds dist/nanobatch-0.5.0-py3-none-linux_x86_64.whl
    python .ci/release.py v0.5.0     the same for a tag: the changelog has to be ready, too

`pyproject.toml` alone holds the version. The wheel must have that version, and carry what git knows,
no more and no less. The changelog's newest entry must have the version, a date, and 40 lines at most.
A tag must have the version, too, and leaves nothing under "Unreleased". The wheel is installed into a
fresh environment, and answers a question there. For a tag all tests with published models have to
pass, and none may be skipped for want of a model: half an hour on two cores.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "nanobatch_checkout/"
LONGEST = 40  # lines of a version's entry


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def wrong_with_changelog(text: str, number: str, tag: str | None) -> list[str]:
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    waiting = [entry for entry in entries if entry.startswith("Unreleased\n")]
    newest = next(entry for entry in entries if entry not in waiting)
    found = []
    if not re.match(rf"{re.escape(number)}, \d{{4}}-\d\d-\d\d\n", newest):
        found.append(f"its newest entry is {newest.splitlines()[0]!r}, and the version is {number}")
    if len(newest.strip().splitlines()) - 1 > LONGEST:
        found.append(
            f"its newest entry has more than {LONGEST} lines; move some to docs/history.md"
        )
    if tag is not None and tag != f"v{number}":
        found.append(f"the tag is {tag}, and the version is {number}")
    if tag is not None and waiting:
        found.append(f"there is an entry Unreleased; name it {number}, with today's date")
    return [f"CHANGELOG.md: {line}" for line in found]


def wrong_with_wheel(wheel: Path, number: str, tracked: set[str]) -> list[str]:
    """A wheel for one platform carries the compiled libraries, too."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        metadata = file.read(f"nanobatch-{number}.dist-info/METADATA").decode()
    carried = {name.removeprefix(FOLDER) for name in names if name.startswith(FOLDER)}
    libraries = {name for name in carried if re.fullmatch(r"kernels/matmul_\w+\.so", name)}
    carried -= libraries
    beside = {name for name in names if not name.startswith((FOLDER, "nanobatch-"))}
    found = [f"git knows {name}, and the wheel lacks it" for name in sorted(tracked - carried)]
    found += [f"it carries {name}, unknown to git" for name in sorted(carried - tracked)]
    found += [f"it puts {name} into site-packages" for name in beside - {"nanobatch.py"}]
    if not libraries and not wheel.stem.endswith("-any"):
        found.append("it is for one platform and carries no compiled library")
    if f"\nVersion: {number}\n" not in metadata:
        found.append(f"it is not of version {number}")
    return [f"{wheel.name}: {line}" for line in found]


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options)
    return done.stdout


def build() -> Path:
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # else what was deleted since is in it
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", ROOT / "dist", ROOT)
    return next((ROOT / "dist").glob(f"nanobatch-{version()}-*.whl"))


def wrong_when_tried(wheel: Path) -> list[str]:
    """In a fresh environment, from a folder that is no checkout."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        run(sys.executable, "-m", "venv", here / "env")
        package = f"nanobatch[cpu] @ {wheel.as_uri()}"
        run(here / "env" / "bin" / "pip", "install", "--quiet", package)
        command = here / "env" / "bin" / "nanobatch"
        said = run(command, "--version", cwd=here)
        answer = run(command, "ask", "Count from 3 to 6.", cwd=here)
    found = []
    if not said.startswith(f"nanobatch {version()} "):
        found.append(f"it says that it is {said.strip()}")
    if "3, 4, 5, 6." not in answer:
        found.append(f"it answers {answer!r}")
    return [f"{wheel.name}: {line}" for line in found]


def wrong_with_published_models() -> list[str]:
    """What the programs do with models that were trained: tools, schemas, long prompts, hang-ups."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-n", "0", "-k", "published"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr)
    return wrong_with_tests(done.returncode, done.stdout)


def wrong_with_tests(code: int, said: str) -> list[str]:
    lines = said.splitlines()
    found = [line for line in lines if re.match("(FAILED|ERROR) ", line)]
    found += [line for line in lines if "the model cannot be had" in line]
    if code and not found:
        found.append(f"pytest -k published ended with {code}")
    return found


def main() -> int:
    tag = sys.argv[1] if len(sys.argv) > 1 else None
    number = version()
    wheel = build()
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    found = wrong_with_changelog((ROOT / "CHANGELOG.md").read_text(), number, tag)
    found += wrong_with_wheel(wheel, number, tracked)
    found = found or wrong_when_tried(wheel)
    if tag is not None:
        found = found or wrong_with_published_models()
    for line in found:
        print(f"nanobatch: {line}", file=sys.stderr)
    if not found:
        print(wheel)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
