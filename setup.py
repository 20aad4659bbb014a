"""Build the package `nanobatch` from the checkout, and compile `kernels/cpu_kernels.c`.

In the checkout a module has a short name, such as `kv`. Installed under that name, `sched` would be shadowed by
the standard library's module. So a wheel has one package: the tree is copied into it, `from kv import Slab`
becomes `from nanobatch.kv import Slab`, and `nanobatch.py` becomes `nanobatch/_engine.py`. An editable install
has a package of the same name that imports from the checkout. With NANOBATCH_PURE=1 a wheel contains no C
libraries, for Macs. Everything else is in `pyproject.toml`.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from subprocess import check_output

from setuptools import Extension, setup
from setuptools.command import bdist_wheel, build_ext, build_py, sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernels import build

ROOT = Path(__file__).resolve().parent
IS_EDITABLE = "NANOBATCH_EDITABLE" in os.environ  # set by build_backend/backend.py
MODULES = {path.stem for path in ROOT.glob("*.py")} - {"setup"}
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"course"}
OTHERS = "README.md CONTRIBUTING.md docs/*.md docs/bench-15m.json docs/make/page.py demo/model/*"
# Modules that the page runs in a browser, under their short names (docs/make/page.py)
PAGE = [
    "request",
    "sched",
    "policies",
    "prefix",
    "experiments/simulator",
    "web/simulate",
]
INIT = '''\
"""The LLM serving engine you can read in an afternoon and watch while it runs."""

__version__ = "%(version)s"
__all__ = %(names)s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nanobatch._engine import *


def __getattr__(name: str) -> object:
    """Load the engine, and MLX with it, when one of its names is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'nanobatch' has no attribute {name!r}")
    from nanobatch import _engine

    return getattr(_engine, name)


def __dir__() -> list[str]:
    return [*__all__, *globals()]
'''
EDITABLE = '''\
"""An editable install: all modules are imported from the checkout."""

import sys

__version__ = "%(version)s"

for _name in %(modules)s:
    _file = getattr(sys.modules.get(_name), "__file__", None) or "%(root)s/"
    if not _file.startswith("%(root)s/"):
        raise ImportError(f"{_file} hides the {_name} of nanobatch, which is an editable install: "
                          "import nanobatch first, or install a wheel: pip install %(root)s")
sys.path.insert(0, "%(root)s")


def __getattr__(name: str) -> object:
    """Replace this package by the checkout's nanobatch.py when one of its names is first used."""
    if not name[:1].isupper():
        raise AttributeError(f"module 'nanobatch' has no attribute {name!r}")
    if sys.modules[__name__].__file__ == __file__:
        del sys.modules[__name__]
    import nanobatch

    nanobatch.__version__ = __version__
    return getattr(nanobatch, name)
'''


def tree() -> dict[str, bytes]:
    """Return the checkout's files that a wheel contains, by their names in the package."""
    patterns = ["*.py", *(f"{name}/**/*" for name in PACKAGES), *OTHERS.split()]
    found = {path for each in patterns for path in ROOT.glob(each) if path.is_file()}
    found = {path for path in found if path.suffix not in (".pyc", ".so")} - {ROOT / "setup.py"}
    paths = {path.relative_to(ROOT).as_posix(): path for path in found}
    paths["_engine.py"] = paths.pop("nanobatch.py")
    files = {name: content_of(path) for name, path in paths.items()}
    return files | {f"web/python/{name}.py": (ROOT / f"{name}.py").read_bytes() for name in PAGE}


def content_of(path: Path) -> bytes:
    """Return a file's content. In a module, rewrite imports of our modules as imports from the package."""
    if path.suffix != ".py":
        return path.read_bytes()
    ours = "|".join(PACKAGES | MODULES | {"docs"})
    text = path.read_text(encoding="utf-8")
    text = re.sub(rf"^( *from )((?:{ours})\b[.\w]* import)", r"\1nanobatch.\2", text, flags=re.M)
    text = re.sub(rf"^( *)import ({ours})\b", r"\1from nanobatch import \2", text, flags=re.M)
    return text.replace("from nanobatch.nanobatch import", "from nanobatch._engine import").encode()


class Package(build_py.build_py):
    def run(self) -> None:
        exported = re.findall(r"__all__ \+?= \[(.*)\]", (ROOT / "nanobatch.py").read_text())
        facts = {"names": re.findall(r"\w+", " ".join(exported)), "root": ROOT}
        facts["modules"] = sorted((PACKAGES | MODULES) - {"nanobatch"})
        facts["version"] = self.distribution.get_version()
        files = {"cli/command.py": b"from cli.command import main\n"} if IS_EDITABLE else tree()
        files["__init__.py"] = ((EDITABLE if IS_EDITABLE else INIT) % facts).encode()
        files["__main__.py"] = b"from nanobatch.cli.command import main\n\nmain()\n"
        folder = Path(self.build_lib, "nanobatch")
        # Drop files that were deleted since the last build
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


class Libraries(build_ext.build_ext):
    """C libraries for ctypes. They are not Python modules, so their names contain no Python version."""

    def get_ext_filename(self, name: str) -> str:
        return f"{name.replace('.', '/')}.so"

    def build_extension(self, extension: Extension) -> None:
        # Keep zig's cache (50 MB) out of the home folder
        os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", os.path.abspath(self.build_temp))
        form = extension.name.rpartition("_")[2]
        output = build.library(form) if IS_EDITABLE else self.get_ext_fullpath(extension.name)
        self.spawn(build.command(form, output))


class Wheel(bdist_wheel.bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Checkout(sdist.sdist):
    def make_distribution(self) -> None:  # all files that git tracks
        if (ROOT / ".git").exists():
            self.filelist.files = check_output(["git", "ls-files"], text=True).splitlines()
        super().make_distribution()


setup(
    packages=["nanobatch"],
    package_dir={"nanobatch": "."},
    ext_modules=[Extension(f"nanobatch.kernels.matmul_{form}", []) for form in build.forms()],
    options={"build_ext": {"parallel": True}},
    cmdclass={"bdist_wheel": Wheel, "build_ext": Libraries, "build_py": Package, "sdist": Checkout},
)
