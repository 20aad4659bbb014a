"""Compile `kernels/matmul.c` at install. Everything else about the package is in `pyproject.toml`.

No library is needed: where there is no compiler, or where one fails, the install succeeds, and
OpenBLAS takes the product's place at start.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))
from kernels import build


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


def extension(form: str) -> Extension:
    module = f"nanobatch_checkout.kernels.{build.library(form).stem}"
    return Extension(module, ["kernels/matmul.c"], optional=True)


setup(
    ext_modules=[extension(form) for form in build.forms() if build.compiler()],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPython},
)
