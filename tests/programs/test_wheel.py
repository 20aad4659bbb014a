"""What a wheel carries, and the command that it installs. The wheel itself is built, compared with
git and tried by `python .ci/release.py`, which takes a minute and a package registry."""

import glob
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from processes import run

from kernels import blas
from parts.wheel import launch
from runtime import cli
from screen.remote_client import RemoteEngineClient

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder as a wheel fills it: the checkout under one name, and `nanobatch.py` beside it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "nanobatch_checkout").symlink_to(ROOT)
    (folder / "nanobatch.py").symlink_to(ROOT / "parts" / "wheel" / "nanobatch.py")
    return folder


def user(site: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A user's Python, somewhere else, with that folder for its site-packages."""
    return run("-c", code, *arguments, cwd="/", PYTHONPATH=str(site))


def command(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from nanobatch_checkout.parts.wheel.launch import main; sys.exit(main())"
    return user(site, code, *arguments)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout of the repository")
def test_a_wheel_carries_each_file_that_git_knows_and_no_other():
    """A new room that `package-data` does not name would be missing in every installation."""
    said = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in said.stdout.splitlines() if (ROOT / name).exists()}
    patterns = ["*.py", *SETTINGS["package-data"]["nanobatch_checkout"]]
    found = {name for each in patterns for name in glob.glob(each, root_dir=ROOT, recursive=True)}
    excluded = SETTINGS["exclude-package-data"]["nanobatch_checkout"]
    ignored = ("*.log", "*.DS_Store")
    carried = {name for name in found if (ROOT / name).is_file()}
    carried = {n for n in carried if not any(fnmatch(n, each) for each in (*excluded, *ignored))}
    said = ["git", "ls-files", "--others", "--exclude-standard"]  # a file that is not added yet
    new = subprocess.run(said, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(tracked) > 300
    assert tracked - carried == set()
    assert carried - tracked - set(new.stdout.splitlines()) == set()


def test_nothing_lands_in_site_packages_that_could_shadow_a_module():
    """`sched` is the standard library's, and `kv` may be anybody's."""
    assert SETTINGS["packages"] == ["nanobatch_checkout"] and SETTINGS["py-modules"] == [
        "nanobatch"
    ]


def test_each_program_is_started_by_the_command_as_in_a_checkout(site):
    for word, file in launch.PROGRAMS.items():
        assert (ROOT / file).is_file()
        if word != "page":
            assert f"nanobatch {word}" in launch.USAGE.replace("[OPTION", "screen")
    version = command(site, "ask", "--version")
    assert version.stdout.startswith("nanobatch 0.") and version.returncode == 0
    assert command(site, "--version").stdout == version.stdout  # an option is one of the screen's
    answered = command(site, "ask", "Count from 3 to 6.")
    assert answered.returncode == 0 and "3, 4, 5, 6." in answered.stdout


def test_a_command_that_is_none_gets_one_line(site):
    done = command(site, "aks", "hello")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "nanobatch: 'aks' is no command; choose among screen, ask, serve, verify, bench, page and learn"
    ]


def test_import_nanobatch_beside_a_wheel_says_in_one_line_how_to_reach_the_engine(site):
    """It was a package whose name one can install and not import."""
    done = user(site, "import nanobatch")
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        "ImportError: the engine is imported from its own folder; put that first"
    )
    remedy = line[line.index("sys.path.insert") :].partition(", and then")[0]
    done = user(
        site,
        f"import sys; {remedy}; from nanobatch import SamplingParams; print(SamplingParams(seed=3))",
    )
    assert "seed=3" in done.stdout, done.stderr


def test_nobody_finds_our_modules_under_their_short_names(site):
    done = user(site, "import sched; print(sched.scheduler); import kv")
    assert "<class 'sched.scheduler'>" in done.stdout
    assert "No module named 'kv'" in done.stderr


def test_learn_copies_a_checkout_that_can_be_changed(site, tmp_path, monkeypatch, capsys):
    """Also from a site-packages that is closed to writers."""
    source = tmp_path / "source"
    for name in ("ask.py", "course/ladder/1_one_token.py", "parts/__pycache__/x.pyc"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("pass\n")
        (source / name).chmod(0o444)
    for folder in (source, *source.rglob("*/")):
        if folder.is_dir():
            folder.chmod(0o555)
    monkeypatch.setattr(launch, "CHECKOUT", source)
    copy = tmp_path / "mine"
    assert launch.learn([str(copy)]) == 0
    assert f"{sys.executable} course/ladder/1_one_token.py" in capsys.readouterr().out
    found = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert found == {"ask.py", "course/ladder/1_one_token.py"}
    assert all(path.stat().st_mode & 0o200 for path in copy.rglob("*"))
    assert launch.learn([str(copy)]) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err
    for wrong in ([], ["--help"], ["a", "b"]):
        assert launch.learn(wrong) == 2
    for folder in (source, *source.rglob("*/")):
        folder.chmod(0o755)


def test_two_backends_of_mlx_that_own_one_file_are_told_of(monkeypatch):
    """Both wheels bring `mlx/lib/libmlx.so`; pip lets the second write over the first."""
    said = []
    monkeypatch.setattr(blas, "say", said.append)
    monkeypatch.setattr(blas, "backends", lambda: ["mlx-cpu", "mlx-cuda-12"])
    assert blas._needs_blas() is False
    (line,) = said
    assert "mlx-cpu and mlx-cuda-12 own the same file" in line and "pip uninstall" in line
    monkeypatch.setattr(blas, "backends", lambda: ["mlx-cpu"])
    blas._needs_blas()
    assert len(said) == 1


def test_what_to_type_for_a_backend_is_said_for_each_way_of_installing(monkeypatch):
    """`pipx inject nanobatch 'mlx[cpu]'` finds that mlx is there, and does nothing."""
    assert cli.install("cpu", "mlx[cpu]") == "pip install -e '.[cpu]' in the checkout"
    monkeypatch.setattr(cli, "IS_INSTALLED", True)
    said = cli.install("cpu", "mlx[cpu]")
    assert said.startswith("pip install 'mlx[cpu]' (")
    assert "pipx runpip nanobatch install 'mlx[cpu]'" in said and "--with 'mlx[cpu]'" in said


def test_a_command_is_said_as_this_installation_spells_it(monkeypatch):
    """Who had installed a wheel read `python serve.py`, a file that is not there."""
    assert cli.command("serve.py", "--model", "a b") == "python serve.py --model 'a b'"
    assert cli.CommandLine("tui.py").prog == "tui.py"
    monkeypatch.setattr(cli, "IS_INSTALLED", True)
    for word, file in launch.PROGRAMS.items():
        assert cli.command(file, "--help") == f"nanobatch {word} --help"
    assert cli.CommandLine("tui.py").prog == "nanobatch screen"
    with pytest.raises(ValueError, match=r"is a server there\? \(nanobatch serve\)"):
        RemoteEngineClient("http://127.0.0.1:1").start()
