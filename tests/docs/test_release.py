"""Wheel, tag and changelog agree: what `.ci/release.py` checks before a release."""

import importlib.util
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks import answer_hash

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)
NUMBER = release.version()
ENTRY = "# Changelog\n\n## 0.9.0, 2030-01-02\n\n- It is.\n\n## 0.8.0, 2029-01-02\n\n- It was.\n"


def test_changelog_has_this_version():
    """An Unreleased section may precede this version's, but then no tag may be set."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert release.wrong_with_changelog(text, NUMBER, None) == []
    if "## Unreleased" in text:
        (line,) = release.wrong_with_changelog(text, NUMBER, f"v{NUMBER}")
        assert "there is an entry Unreleased" in line


@pytest.mark.parametrize(
    "text, tag, said",
    [
        (ENTRY, "v0.9.0", []),
        (ENTRY, None, []),
        (ENTRY.replace("0.9.0, ", "[0.9.0] - "), "v0.9.0", []),
        (ENTRY, "v0.9.1", ["the tag is v0.9.1, and the version is 0.9.0"]),
        (ENTRY.replace("0.9.0", "0.9.1"), None, ["its newest entry is '0.9.1, 2030-01-02'"]),
        (ENTRY.replace(", 2030-01-02", ""), None, ["its newest entry is '0.9.0'"]),
        (ENTRY.replace("- It is.\n", "- It is.\n" * 41), None, ["more than 40 lines"]),
        (ENTRY.replace("## 0.9", "## Unreleased\n\n- New.\n\n## 0.9"), None, []),
        (ENTRY.replace("## 0.9", "## Unreleased\n\n- New.\n\n## 0.9"), "v0.9.0", ["Unreleased"]),
    ],
)
def test_a_changelog_that_is_not_ready_is_told_of(text, tag, said):
    found = release.wrong_with_changelog(text, "0.9.0", tag)
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))


def make_wheel(folder: Path, tag: str, *names: str) -> Path:
    wheel = folder / f"nanobatch-0.9.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("nanobatch-0.9.0.dist-info/METADATA", "Name: nanobatch\nVersion: 0.9.0\n\n")
        for name in names:
            file.writestr(name, "")
    return wheel


def test_wheel_is_compared_with_the_package(tmp_path):
    """Regression: a wheel contained deleted files that were still in a build folder."""
    wheel = make_wheel(tmp_path, "any", "nanobatch/kv.py", "nanobatch/old.py")
    assert release.wrong_with_wheel(wheel, "0.9.0", {"kv.py", "old.py"}) == []
    lacks, carries = release.wrong_with_wheel(wheel, "0.9.0", {"kv.py", "sched.py"})
    assert lacks.endswith("it lacks sched.py")
    assert carries.endswith("it carries old.py, which does not belong to it")
    wheel = make_wheel(tmp_path, "any", "nanobatch/kv.py", "sched.py")
    (other,) = release.wrong_with_wheel(wheel, "0.9.0", {"kv.py"})
    assert other.endswith("it puts sched.py into site-packages")


def test_wheel_for_one_platform_carries_the_libraries(tmp_path, monkeypatch):
    """A wheel for Linux is refused if it lacks the matrix product, as after a failed compilation."""
    monkeypatch.setattr(release.kernels, "forms", lambda: ["avx2"])
    wheel = make_wheel(tmp_path, "manylinux_2_17_x86_64", "nanobatch/kv.py")
    (line,) = release.wrong_with_wheel(wheel, "0.9.0", {"kv.py"})
    assert line.endswith("it lacks kernels/matmul_avx2.so")
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr("nanobatch/kernels/matmul_avx2.so", "")
    assert release.wrong_with_wheel(wheel, "0.9.0", {"kv.py"}) == []


def test_sdist_is_what_git_knows(tmp_path):
    sdist = tmp_path / "nanobatch-0.9.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as file:
        for name in ("PKG-INFO", "setup.cfg", "nanobatch.egg-info/SOURCES.txt", "kv.py", "mine.py"):
            file.addfile(tarfile.TarInfo(f"nanobatch-0.9.0/{name}"))
    assert release.wrong_with_sdist(sdist, {"kv.py", "mine.py"}) == []
    (line,) = release.wrong_with_sdist(sdist, {"kv.py"})
    assert line.endswith("it carries mine.py, which does not belong to it")


@pytest.mark.parametrize(
    "code, said, found",
    [
        (0, "SKIPPED [1] tests/conftest.py:9: no browser\n20 passed, 1 skipped\n", 0),
        (0, "SKIPPED [2] tests/conftest.py:9: the model is unavailable: pip download\n", 1),
        (1, "FAILED tests/programs/test_published.py::test_a - assert 1\n1 failed, 3 passed\n", 1),
        (1, "ERROR tests/programs/test_published.py::test_a\n", 1),
        (5, "no tests ran\n", 1),
    ],
)
def test_a_release_needs_the_published_models(code, said, found):
    """If a model is not available, its tests are skipped, but pytest still returns 0."""
    assert len(release.wrong_with_tests(code, said)) == found


def test_newest_mlx_is_one_whose_hash_was_seen():
    """With another version of MLX, the demo's bits may differ from those in the README."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (mlx,) = [each for each in project["dependencies"] if each.startswith("mlx")]
    assert mlx.rpartition("<=")[2] in answer_hash.EXPECTED
