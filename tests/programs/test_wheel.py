"""The package `nanobatch` that users install: from a wheel, and as an editable install.

    NANOBATCH_INSTALLED=env/bin/python python -m pytest tests/programs/test_wheel.py

tests what is installed there instead of a wheel built here, as `python .ci/release.py` does.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from fcntl import LOCK_EX, flock
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from processes import run

from base import installation
from cli import options
from docs.make import page
from kernels import build, library
from models.memory import sources
from screen.remote_client import RemoteEngineClient

ROOT = Path(__file__).parents[2]
INSTALLED = os.environ.get("NANOBATCH_INSTALLED")
COUNT = "from nanobatch import Engine; print(Engine.load('demo', slots=1).generate(['Count from 3 to 6.'])[0].text)"


@pytest.fixture(scope="session")
def sites(tmp_path_factory) -> Path:
    """Return a folder with three unpacked wheels: `wheel` contains the checkout's C libraries, `pure` none,
    and `editable` only a link to the checkout. They are built once for all workers of a run."""
    if INSTALLED:
        pytest.skip("an installed package is tried")
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "sites"
    with (shared / "sites.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not folder.exists():
            built = {"pure": {}, "editable": {"NANOBATCH_EDITABLE": "1"}}
            for name, environment in built.items():
                place = shared / f"build-{name}"
                place.mkdir()
                words = f"-q egg_info --egg-base {place} build --build-base {place} bdist_wheel"
                done = run(
                    "setup.py", *words.split(), "-d", place, NANOBATCH_PURE="1", **environment
                )
                assert done.returncode == 0, done.stderr
                (wheel,) = place.glob("*.whl")
                zipfile.ZipFile(wheel).extractall(shared / "unpacked" / name)
            shutil.copytree(shared / "unpacked" / "pure", shared / "unpacked" / "wheel")
            for file in (ROOT / "kernels").glob("*.so"):
                shutil.copy(file, shared / "unpacked" / "wheel" / "nanobatch" / "kernels")
            (shared / "unpacked").rename(folder)
    return folder


@pytest.fixture(scope="session")
def wheel(request) -> Path:
    if INSTALLED:
        done = user(Path(), "-c", "import nanobatch; print(*nanobatch.__path__)")
        return Path(done.stdout.strip()).parent
    return request.getfixturevalue("sites") / "wheel"


@pytest.fixture(scope="session", params=["wheel", "editable"])
def package(request) -> Path:
    """A site-packages folder that contains the package."""
    if request.param == "wheel":
        return request.getfixturevalue("wheel")
    return request.getfixturevalue("sites") / "editable"


def user(site: Path, *words: object, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    """Run Python as a user does, outside the checkout and with `site` on its path."""
    return subprocess.run(
        [INSTALLED or sys.executable, "-P", *map(str, words)],
        cwd=cwd,
        env=os.environ | ({} if INSTALLED else {"PYTHONPATH": str(site)}),
        capture_output=True,
        text=True,
        timeout=100,
    )


def command(site: Path, *words: object, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    return user(site, "-m", "nanobatch", *words, cwd=cwd)


# --- what users do ------------------------------------------------------------------------------


def test_engine_is_imported_from_an_empty_folder(package, tmp_path):
    done = user(
        package, "-c", f"{COUNT}; import nanobatch; print(nanobatch.__version__)", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-3:] == ["3, 4, 5, 6.", installation.version_number(), ""]
    missing = user(package, "-c", "from nanobatch import Motor", cwd=tmp_path)
    assert "cannot import name 'Motor' from 'nanobatch'" in missing.stderr


def test_command_runs_in_an_empty_folder(package, tmp_path):
    """The command writes no files, neither into the current folder nor into the package."""
    before = listing(package)
    answered = command(package, "ask", "Count from 3 to 6.", cwd=tmp_path)
    assert answered.returncode == 0 and "3, 4, 5, 6." in answered.stdout, answered.stderr
    if INSTALLED or [*(ROOT / "kernels").glob("*.so")]:
        assert "; rows (" in answered.stderr
    usage = command(package, "chat", "--help", cwd=tmp_path).stdout
    assert usage.startswith("usage: nanobatch ask ")
    assert not [*tmp_path.iterdir()] and listing(package) == before


def listing(site: Path) -> set[Path]:
    return {path for path in site.glob("nanobatch/**/*") if "__pycache__" not in path.parts}


def test_learn_says_where_the_course_is(package):
    """Regression: in a clone it said that the course is in a clone."""
    said = command(package, "learn").stdout
    if package.name == "editable":
        assert f"cd {ROOT}\n" in said and "clone" not in said
        assert (ROOT / re.search(r"python (course/\S+)", said)[1]).exists()
    else:
        assert f"a clone, or nanobatch-{installation.version_number()}.tar.gz" in said


def test_import_and_version_do_not_load_mlx(package):
    code = """
import sys, nanobatch
from nanobatch.cli.command import main
sys.argv = ["nanobatch", "--version"]
try:
    main()
finally:
    print([name for name in sys.modules if name.partition(".")[0] in ("mlx", "textual", "rich")])
"""
    version, loaded = user(package, "-c", code).stdout.splitlines()
    assert re.match(r"nanobatch \d+\.\d+\.\d+ \(mlx ", version) and loaded == "[]"


def test_a_missing_backend_is_one_line_of_the_command(package, tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so is missing')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['ask', 'x']\n"
    done = user(package, "-c", f"{code}from nanobatch.cli.command import main; main()")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("nanobatch: MLX has no backend here: run ")


# --- a wheel ------------------------------------------------------------------------------------


def test_wheel_holds_the_package_and_nothing_else(wheel):
    """Regression: a wheel put tests and CI files into site-packages."""
    if not INSTALLED:
        assert {path.name.partition("-")[0] for path in wheel.iterdir()} == {"nanobatch"}
    names = {path.relative_to(wheel / "nanobatch").as_posix() for path in listing(wheel)}
    assert {"_engine.py", "kv.py", "models/ops.py", "screen/pages/busy_periods.py"} <= names
    assert {"demo/model/model.safetensors", "web/index.html", "kernels/cpu_kernels.c"} <= names
    left_out = ("tests", "course/ladder", "course/from_zero", "setup.py", "build", ".")
    assert not [name for name in names if name.startswith(left_out)]


def test_every_module_of_the_wheel_is_imported(wheel):
    """No module is imported under its short name: `sched` is the standard library's."""
    files = [path for path in listing(wheel) if path.suffix == ".py" and "python" not in path.parts]
    code = """
import sched, sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
short = {name.partition(".")[2] for name in sys.argv[1:]}
print(sorted(short & {*sys.modules} - {"sched"}), sched.scheduler)
"""
    left_out = ("__main__", "quality")  # `quality` needs numpy
    paths = [path.relative_to(wheel).with_suffix("") for path in files if path.stem not in left_out]
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    assert len(names) > 130
    done = user(wheel, "-c", code, *names)
    assert done.stdout == "[] <class 'sched.scheduler'>\n", done.stderr
    ours = {name.split(".")[1] for name in names if "." in name}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not ours & {name.partition(".")[0] for name in imported}, (path, node.lineno)


def test_wheel_without_libraries_says_that_it_is_for_macs(sites):
    done = command(sites / "pure", "ask", "Count from 3 to 6.")
    assert "3, 4, 5, 6." in done.stdout, "the tokens are right without our product"
    if build.forms():
        assert "; mlx, so bits may differ with the batch: this wheel is for Macs; " in done.stderr


def test_ranks_compare_the_same_files_in_a_wheel(wheel):
    """The list includes `_engine.py`, which is the name of `nanobatch.py` in a wheel."""
    code = "from nanobatch.models.memory import sources; print(*(each.name for each in sources()))"
    names = user(wheel, "-c", code).stdout.split()
    ours = [path.name for path in sources()]
    assert sorted(names) == sorted("_engine.py" if n == "nanobatch.py" else n for n in ours)


def test_children_of_a_wheel_are_its_own(wheel, tmp_path):
    """Children start with -P, because `python -m` would otherwise search the user's folder first."""
    (tmp_path / "nanobatch.py").write_text("raise SystemExit('mine')\n")
    code = "from nanobatch.base import installation; print(*installation.start('verify.py')[1:])"
    flag, *words = user(wheel, "-c", code).stdout.split()
    assert flag == "-P"
    assert user(wheel, *words, "--version", cwd=tmp_path).stdout.startswith("nanobatch ")


def test_grammars_of_a_wheel(wheel):
    """Grammars run in a separate process, which imports the package's modules by name."""
    code = """
from nanobatch import Engine, SamplingParams
with Engine.load("demo", slots=1) as engine:
    grammar = {"regex": "[0-9]{3}"}
    print(engine.generate(["Count."], SamplingParams(max_tokens=9, grammar=grammar))[0].text)
"""
    done = user(wheel, "-c", code)
    assert re.fullmatch(r"\d{3}\n", done.stdout), done.stderr


def test_page_of_a_wheel_embeds_the_scheduler_as_it_is(wheel, tmp_path):
    """The files need no change, because in a browser `sched` is imported by its short name."""
    done = command(wheel, "page", ROOT / "docs" / "index.html", tmp_path / "out.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out.html").read_text()
    lab = json.loads(re.search(page.EMBEDDED.format("lab"), text)[1])
    for name in page.SCHEDULER:
        assert lab["sources"][name] == (ROOT / name).read_text()
    assert lab["sources"]["simulate.py"] == (ROOT / "web" / "simulate.py").read_text()


# --- an editable install ------------------------------------------------------------------------


def test_editable_install_leads_to_this_checkout(sites):
    """The install adds only `nanobatch` to site-packages. Regression: with a .pth file, `import sched` found
    our module in every program."""
    assert {path.name.partition("-")[0] for path in (sites / "editable").iterdir()} == {"nanobatch"}
    code = """
import sys, nanobatch
from nanobatch import Engine
import kv, nanobatch as engine
print(kv.__file__, engine.__file__, nanobatch.Engine is engine.Engine)
"""
    done = user(sites / "editable", "-c", code)
    assert done.stdout == f"{ROOT / 'kv.py'} {ROOT / 'nanobatch.py'} True\n", done.stderr


@pytest.mark.parametrize("name", ["sched", "models"])
def test_module_with_our_name_that_was_imported_first(package, tmp_path, name):
    """An editable install, whose modules have short names, refuses to start if one is already taken. A wheel
    is not affected."""
    (tmp_path / "models.py").write_text("")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import {name}\n{COUNT}"
    done = user(package, "-c", code)
    if package.name == "editable":
        line = done.stderr.splitlines()[-1]
        assert re.match(rf"ImportError: /.*/{name}.py hides the {name} of nanobatch, ", line)
        assert line.endswith(f"pip install {ROOT}")
    else:
        assert "3, 4, 5, 6." in done.stdout, done.stderr


# --- a compiler ---------------------------------------------------------------------------------


def backend():
    spec = spec_from_file_location("backend", ROOT / "build_backend" / "backend.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "platform, path, wanted",
    [("linux", "", ["ziglang"]), ("linux", "bin", []), ("darwin", "", [])],
)
def test_build_asks_for_a_compiler_where_there_is_none(
    monkeypatch, tmp_path, platform, path, wanted
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcc").touch(0o755)
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / path))
    hooks = backend()
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("wheel", "editable"):
        name = f"get_requires_for_build_{kind}"
        monkeypatch.setattr(hooks.build_meta, name, lambda settings: ["x"])
        assert getattr(hooks, name)() == ["x", *wanted]


def test_build_without_a_compiler_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="apt install gcc, or pip install ziglang"):
        build.command(build.forms()[0], Path("x.so"))


# --- messages to users --------------------------------------------------------------------------


def test_two_backends_of_mlx_that_own_one_file_are_told_of(monkeypatch):
    """Two backends of MLX are reported, because both install `mlx/lib/libmlx.so`, and pip lets the second
    overwrite the first."""
    said = []
    monkeypatch.setattr(library, "say", said.append)
    monkeypatch.setattr(library, "backends", lambda: ["mlx-cpu", "mlx-cuda-12"])
    assert library.is_needed() is False
    (line,) = said
    assert "mlx-cpu and mlx-cuda-12 install the same file" in line and "pip uninstall" in line
    monkeypatch.setattr(library, "backends", lambda: ["mlx-cpu"])
    library.is_needed()
    assert len(said) == 1


def test_what_to_type_for_a_backend_is_said_for_each_way_of_installing(monkeypatch):
    """`pipx inject nanobatch 'mlx[cpu]'` does nothing if mlx is already installed, so `runpip` is named."""
    assert installation.install("cpu", "mlx[cpu]") == "pip install -e '.[cpu]' in the checkout"
    monkeypatch.setattr(installation, "IS_INSTALLED", True)
    said = installation.install("cpu", "mlx[cpu]")
    assert said.startswith("pip install 'mlx[cpu]' (")
    assert "pipx runpip nanobatch install 'mlx[cpu]'" in said and "--with 'mlx[cpu]'" in said


def test_a_command_is_said_as_this_installation_spells_it(monkeypatch):
    """Regression: users of a wheel were told to run `python serve.py`, a file that does not exist there."""
    assert installation.command("serve.py", "--model", "a b") == "python serve.py --model 'a b'"
    assert options.CommandLine("tui.py").prog == "tui.py"
    monkeypatch.setattr(installation, "IS_INSTALLED", True)
    programs = {"screen": "tui.py", "ask": "ask.py", "page": "docs/make/page.py"}
    for word, file in programs.items():
        assert installation.command(file, "--help") == f"nanobatch {word} --help"
    assert options.CommandLine("tui.py").prog == "nanobatch screen"
    with pytest.raises(ValueError, match=r"is a server there\? \(nanobatch serve\)"):
        RemoteEngineClient("http://127.0.0.1:1").start()
