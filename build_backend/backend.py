"""The build backend: setuptools, plus zig as a build requirement on machines without a C compiler."""

import os
from runpy import run_path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the other hooks)

requirements = run_path("kernels/build.py")["requirements"]  # builds run in the root


def get_requires_for_build_wheel(settings=None):
    return build_meta.get_requires_for_build_wheel(settings) + requirements()


def get_requires_for_build_editable(settings=None):
    return build_meta.get_requires_for_build_editable(settings) + requirements()


def build_editable(folder, settings=None, metadata=None):
    os.environ["NANOBATCH_EDITABLE"] = "1"
    return build_meta.build_wheel(folder, settings, metadata)
