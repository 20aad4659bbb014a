"""Compile `kernels/cpu_kernels.c`, and make the package `nanobatch` (`package.py`). The rest is in
`pyproject.toml`.

No library is needed: where there is no compiler, or where one fails, the install succeeds, and
OpenBLAS takes the product's place at start. NANOBATCH_PURE=1 makes a wheel without libraries, for any
platform.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).parent))
import package
from kernels import build

ROOT = Path(__file__).parent


class BuildPackage(build_py):
    """The files of the package; of an editable install, one that leads to the checkout."""

    is_editable = False

    def run(self) -> None:
        folder = Path(self.build_lib, package.NAME)
        shutil.rmtree(folder, ignore_errors=True)  # else what was deleted since is in it
        for name, content in self.contents():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def contents(self) -> list[tuple[str, bytes]]:
        if not self.is_editable:
            return [*package.Tree(ROOT).contents()]
        leads = package.EDITABLE.format(file=str(ROOT.resolve() / "package.py"))
        return [("__init__.py", leads.encode()), ("__main__.py", package.MAIN.encode())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [str(Path(self.build_lib, package.NAME, name)) for name, _ in self.contents()]

    def get_source_files(self) -> list[str]:
        return package.Tree(ROOT).files


class EditableWheel(Command):
    """A wheel with libraries in the checkout, and a package that leads there."""

    description = "build a wheel for an editable install"
    user_options = editable_wheel.user_options

    def initialize_options(self) -> None:
        self.dist_dir = self.dist_info_dir = self.mode = None

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        if self.distribution.ext_modules:
            self.reinitialize_command("build_ext", inplace=True)
            self.run_command("build_ext")
            self.distribution.ext_modules = []  # they are in the checkout, and not in the wheel
        self.get_finalized_command("build_py").is_editable = True
        self.get_finalized_command("bdist_wheel").dist_dir = self.dist_dir
        self.run_command("bdist_wheel")


class BuildLibraries(build_ext):
    """They are loaded by ctypes, and are no Python modules: their names name no version of Python."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = True

    def get_ext_filename(self, name: str) -> str:
        return f"{name.replace('.', '/')}.so"

    def build_extension(self, extension: Extension) -> None:
        output = Path(self.get_ext_fullpath(extension.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        self.spawn(build.command(extension.name.rpartition("_")[2], output))


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Checkout(sdist):
    """All that git knows. Unpacked, an sdist has no `.git`, and has nothing else in it."""

    def make_distribution(self) -> None:
        if (ROOT / ".git").exists():
            said = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
            names = said.stdout.decode().splitlines()
        else:
            names = [str(path) for path in Path().rglob("*")]
        self.filelist.files = [name for name in names if Path(name).is_file()]
        super().make_distribution()


def extension(form: str) -> Extension:
    module = f"{package.NAME}.kernels.{build.library(form).stem}"
    return Extension(module, ["kernels/cpu_kernels.c"], optional=True)


forms = build.forms() if build.compiler() and not os.environ.get("NANOBATCH_PURE") else []
setup(
    packages=[package.NAME],
    package_dir={package.NAME: "."},
    ext_modules=[extension(form) for form in forms],
    cmdclass={
        "bdist_wheel": AnyPython,
        "build_ext": BuildLibraries,
        "build_py": BuildPackage,
        "editable_wheel": EditableWheel,
        "sdist": Checkout,
    },
)
