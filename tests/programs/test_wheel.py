"""The package that a wheel installs, its command, and an editable install. The release check
(`python .ci/release.py`) installs the wheel as users do."""

import json
import os
import re
import shutil
import subprocess
import zipfile
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest
from processes import run

import package
from base import installation
from cli import options
from docs.make import page
from kernels import blas_preload
from models.memory import sources
from screen.remote_client import RemoteEngineClient

ROOT = Path(__file__).parents[2]
TREE = package.Tree(ROOT)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The wheel, unpacked as in site-packages; built once for all workers of a run."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not folder.exists():
            build(shared / "build")
            (wheel,) = (shared / "build").glob("*.whl")
            zipfile.ZipFile(wheel).extractall(shared / "unpacked")
            for library in (ROOT / "kernels").glob("*.so"):
                shutil.copy(library, shared / "unpacked" / "nanobatch" / "kernels")
            (shared / "unpacked").rename(folder)
    return folder


def build(folder: Path) -> None:
    """Without the C libraries, which take half a minute to compile."""
    words = f"-q egg_info --egg-base {folder} build --build-base {folder}"
    folder.mkdir()
    done = run("setup.py", *words.split(), "bdist_wheel", "-d", folder, NANOBATCH_PURE="1")
    assert done.returncode == 0, done.stderr


def user(site: Path, *words: object, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    """A user's Python, somewhere else, with that folder among its site-packages."""
    return run("-P", *words, cwd=cwd, PYTHONPATH=str(site))


def command(site: Path, *words: object, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    return user(site, "-m", "nanobatch", *words, cwd=cwd)


# --- the wheel ----------------------------------------------------------------------------------


def test_wheel_holds_the_package_and_nothing_else(site):
    """A wheel carried tests and CI files into site-packages."""
    assert {path.name.partition("-")[0] for path in site.iterdir()} == {"nanobatch"}
    files = {p.relative_to(site / "nanobatch").as_posix() for p in site.glob("nanobatch/**/*.*")}
    assert {"_engine.py", "kv.py", "models/ops.py", "screen/pages/busy_periods.py"} <= files
    assert {"demo/model/model.safetensors", "web/index.html", "kernels/cpu_kernels.c"} <= files
    left_out = ("tests/", "course/ladder", "course/from_zero", "setup.py", "package.py", ".")
    assert not [name for name in files if name.startswith(left_out) or name.endswith(".pyc")]


def test_every_module_of_the_wheel_is_imported(site):
    """And none under its short name: `sched` is the standard library's."""
    code = """
import pathlib, sched, sys
from importlib import import_module
files = sorted(pathlib.Path(sys.argv[1]).glob("nanobatch/**/*.py"))
files = [file.relative_to(sys.argv[1]) for file in files if "python" not in file.parts]
for file in files:
    if file.name != "__main__.py":
        import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
short = {".".join(file.with_suffix("").parts[1:]) for file in files}
print(len(files), sorted(short & {*sys.modules} - {"sched", "__main__"}), sched.scheduler)
"""
    done = user(site, "-c", code, site)
    assert done.returncode == 0, done.stderr
    count, rest = done.stdout.split(" ", 1)
    assert int(count) > 130
    assert rest == "[] <class 'sched.scheduler'>\n"


def test_import_and_version_do_not_load_mlx(site):
    code = """
import sys, nanobatch
from nanobatch.cli import command
assert nanobatch.__version__ and "Engine" in dir(nanobatch)
sys.argv = ["nanobatch", "--version"]
try:
    command.main()
finally:
    print([name for name in sys.modules if name.partition(".")[0] in ("mlx", "textual", "rich")])
"""
    done = user(site, "-c", code)
    version, loaded = done.stdout.splitlines()
    assert re.match(r"nanobatch \d+\.\d+\.\d+ \(mlx ", version) and loaded == "[]"


def test_engine_is_imported_from_the_package(site):
    """`import nanobatch` told the user to edit sys.path."""
    code = """
from nanobatch import Engine, SamplingParams
from nanobatch.kv import Slab
with Engine.load("demo", slots=1) as engine:
    grammar = {"regex": "[0-9]{3}"}  # in a process of its own
    (result,) = engine.generate(["Count."], SamplingParams(max_tokens=9, grammar=grammar))
print(result.text)
"""
    done = user(site, "-c", code)
    assert re.fullmatch(r"\d{3}\n", done.stdout), done.stderr
    missing = user(site, "-c", "from nanobatch import Motor")
    assert "cannot import name 'Motor' from 'nanobatch'" in missing.stderr


def test_ranks_compare_the_same_files_in_a_package(site):
    """They would not have seen a changed `nanobatch.py`, which is called `_engine.py` there."""
    code = "from nanobatch.models.memory import sources; print(*(each.name for each in sources()))"
    names = user(site, "-c", code).stdout.split()
    ours = [path.name for path in sources()]
    assert sorted(names) == sorted("_engine.py" if n == "nanobatch.py" else n for n in ours)


# --- the command --------------------------------------------------------------------------------


def test_command_runs_in_an_empty_folder(site, tmp_path):
    answered = command(site, "ask", "Count from 3 to 6.", cwd=tmp_path)
    assert answered.returncode == 0 and "3, 4, 5, 6." in answered.stdout, answered.stderr
    assert "demo" in command(site, "models", cwd=tmp_path).stdout
    usage = command(site, "chat", "--help", cwd=tmp_path).stdout
    assert usage.startswith("usage: nanobatch ask ")
    assert not [*tmp_path.iterdir()]


def test_command_plays_a_user_module_no_trick(site, tmp_path):
    """With -m, Python searches the user's folder first."""
    (tmp_path / "nanobatch.py").write_text("raise SystemExit('mine')\n")
    code = "import sys; from nanobatch.base import installation; print(*installation.start('verify.py')[1:])"
    words = user(site, "-c", code).stdout.split()
    done = run(*words, "--version", cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.startswith("nanobatch ")


def test_page_of_a_wheel_embeds_the_scheduler_as_it_is(site, tmp_path):
    """In a browser `sched` has its short name."""
    done = command(site, "page", ROOT / "docs" / "index.html", tmp_path / "out.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out.html").read_text()
    lab = json.loads(re.search(page.EMBEDDED.format("lab"), text)[1])
    for name in page.SCHEDULER:
        assert lab["sources"][name] == (ROOT / name).read_text()
    assert lab["sources"]["simulate.py"] == (ROOT / "web" / "simulate.py").read_text()


def test_completion_knows_commands_and_options(site, tmp_path):
    script = command(site, "completion").stdout
    asks = "{ COMP_WORDS=(nanobatch $1 $2); COMP_CWORD=$3; _nanobatch nanobatch $2; echo ${COMPREPLY[@]}; }"
    lines = [
        "asks()",
        asks,
        "asks se se 1",
        "asks serve --por 2",
        "asks chat --po 2",
        "asks -- -- 1",
    ]
    done = subprocess.run(
        ["bash", "-c", "\n".join([script, *lines])], capture_output=True, text=True, check=True
    )
    serve, port, policy, screen = done.stdout.splitlines()
    assert (serve, port, policy) == ("serve", "--port", "--policy")
    assert "--screenshot" in screen.split()


# --- rewriting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before, after",
    [
        ("from kv import Slab", "from nanobatch.kv import Slab"),
        ("from models.ops import silu", "from nanobatch.models.ops import silu"),
        ("from models import model_finder", "from nanobatch.models import model_finder"),
        (
            "from nanobatch import (\n    Engine,\n)",
            "from nanobatch._engine import (\n    Engine,\n)",
        ),
        ("import serve", "from nanobatch import serve"),
        ("import serve as s; x = 1", "from nanobatch import serve as s; x = 1"),
        (
            "import models.model_finder as finder",
            "from nanobatch.models import model_finder as finder",
        ),
        ("import nanobatch", "from nanobatch import _engine as nanobatch"),
        (
            "from kv import Slab; import sched",
            "from nanobatch.kv import Slab; from nanobatch import sched",
        ),
        ("def f():\n    import kv", "def f():\n    from nanobatch import kv"),
        ("import json, os.path", "import json, os.path"),
        ("from .ops import silu", "from .ops import silu"),
        ("x = 'the kv cache'  # import kv", "x = 'the kv cache'  # import kv"),
        ('"""from kv import Slab"""', '"""from kv import Slab"""'),
    ],
)
def test_imports_are_rewritten(before, after):
    assert TREE.rewritten(before, "x.py") == after


@pytest.mark.parametrize(
    "text, said",
    [
        ("import kv, sched", "x.py:1: import kv in a line of its own"),
        ("import models.model_finder", "x.py:1: import models.model_finder in a line of its own"),
        ("from  kv import Slab", "x.py:1: write the import with one space"),
        ("from kv \\\n  import Slab\nimport  kv", "x.py:3: write the import with one space"),
        ("\nfrom course.from_zero import start", "x.py:2 imports start of course.from_zero"),
        ("from models import nothing", "x.py:1 imports nothing of models"),
        ("import_module('kv')", "x.py:1: a string names the module kv"),
        ("run('-c', 'import sys; from kv import Slab')", "x.py:1: a string names the module kv"),
        ("x = f'import {y}; import kv'", "x.py:1: a string names the module kv"),
        ("Trials('text.grammar')", "x.py:1: a string names the module text.grammar"),
    ],
)
def test_import_that_cannot_be_rewritten_is_an_error(text, said):
    """A name that stays short would find another module, or none, on a user's machine."""
    with pytest.raises(ValueError, match=re.escape(said)):
        TREE.rewritten(text, "x.py")


# --- an editable install ------------------------------------------------------------------------


def test_editable_install_sees_an_edit_at_once(tmp_path):
    """Under the package's names, with the standard library's `sched`, from any folder."""
    tree, site = tmp_path / "tree", tmp_path / "site" / "nanobatch"
    (tree / "course").mkdir(parents=True)
    site.mkdir(parents=True)
    for name in ("package.py", "pyproject.toml", *package.KEPT[:2]):
        shutil.copy(ROOT / name, tree / name)
    (tree / "nanobatch.py").write_text("__all__ = ['Engine']\nfrom sched import Engine\n")
    leads = package.EDITABLE.format(file=str(tree / "package.py"))
    (site / "__init__.py").write_text(leads)
    code = "import sched; from nanobatch import Engine; print(Engine, sched.scheduler)"
    for value in ("first", "second"):
        (tree / "sched.py").write_text(f"Engine = {value!r}\n")
        done = user(site.parent, "-c", code)
        assert done.stdout == f"{value} <class 'sched.scheduler'>\n", done.stderr


def test_editable_install_leads_to_this_checkout(tmp_path):
    (tmp_path / "nanobatch").mkdir()
    leads = package.EDITABLE.format(file=str(ROOT / "package.py"))
    (tmp_path / "nanobatch" / "__init__.py").write_text(leads)
    code = "from nanobatch.docs.make import page; from nanobatch import kv; print(kv.__file__)"
    done = user(tmp_path, "-c", code)
    assert done.stdout == f"{ROOT / 'kv.py'}\n", done.stderr


# --- what users read ----------------------------------------------------------------------------


def test_two_backends_of_mlx_that_own_one_file_are_told_of(monkeypatch):
    """Both wheels bring `mlx/lib/libmlx.so`; pip lets the second write over the first."""
    said = []
    monkeypatch.setattr(blas_preload, "say", said.append)
    monkeypatch.setattr(blas_preload, "backends", lambda: ["mlx-cpu", "mlx-cuda-12"])
    assert blas_preload._needs_blas() is False
    (line,) = said
    assert "mlx-cpu and mlx-cuda-12 own the same file" in line and "pip uninstall" in line
    monkeypatch.setattr(blas_preload, "backends", lambda: ["mlx-cpu"])
    blas_preload._needs_blas()
    assert len(said) == 1


def test_what_to_type_for_a_backend_is_said_for_each_way_of_installing(monkeypatch):
    """`pipx inject nanobatch 'mlx[cpu]'` finds that mlx is there, and does nothing."""
    assert installation.install("cpu", "mlx[cpu]") == "pip install -e '.[cpu]' in the checkout"
    monkeypatch.setattr(installation, "IS_INSTALLED", True)
    said = installation.install("cpu", "mlx[cpu]")
    assert said.startswith("pip install 'mlx[cpu]' (")
    assert "pipx runpip nanobatch install 'mlx[cpu]'" in said and "--with 'mlx[cpu]'" in said


def test_a_command_is_said_as_this_installation_spells_it(monkeypatch):
    """Who had installed a wheel read `python serve.py`, a file that is not there."""
    assert installation.command("serve.py", "--model", "a b") == "python serve.py --model 'a b'"
    assert options.CommandLine("tui.py").prog == "tui.py"
    monkeypatch.setattr(installation, "IS_INSTALLED", True)
    programs = {"screen": "tui.py", "ask": "ask.py", "page": "docs/make/page.py"}
    for word, file in programs.items():
        assert installation.command(file, "--help") == f"nanobatch {word} --help"
    assert options.CommandLine("tui.py").prog == "nanobatch screen"
    with pytest.raises(ValueError, match=r"is a server there\? \(nanobatch serve\)"):
        RemoteEngineClient("http://127.0.0.1:1").start()
