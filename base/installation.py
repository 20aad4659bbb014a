"""Differences between a checkout and an installed package: the version, command lines,
how to start our programs, how to install an extra."""

import os
import shlex
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# True in a wheel; an editable install counts as a checkout
IS_INSTALLED = __name__.startswith("nanobatch.")
is_command = False  # set by the command `nanobatch`, also in an editable install


def version() -> str:
    """Return the versions of nanobatch, MLX, Python and the system: the first line of a bug report."""
    import platform  # imported here, because most runs do not need it
    from importlib import metadata

    try:
        mlx = f"mlx {metadata.version('mlx')}"
    except metadata.PackageNotFoundError:
        mlx = "no mlx"
    python = f"Python {platform.python_version()}"
    system = f"{platform.system()} {platform.machine()}"
    return f"nanobatch {version_number()} ({mlx}, {python}, {system})"


def version_number() -> str:
    """Return the version from `pyproject.toml` or the package's metadata."""
    import tomllib
    from importlib import metadata

    if IS_INSTALLED:
        return metadata.version("nanobatch")
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        return tomllib.load(file)["project"]["version"]


def command(program: str, *arguments: str) -> str:
    """Return the command line that runs a program such as serve.py: `python serve.py` in a checkout,
    `nanobatch serve` in an installed package or under the command `nanobatch`."""
    word = os.path.basename(program).removesuffix(".py").replace("tui", "screen")
    start = ["nanobatch", word] if IS_INSTALLED or is_command else ["python", program]
    return shlex.join([*start, *arguments])


def start(program: str) -> list[str]:
    """Return the arguments that start one of our programs with this process's Python."""
    if not IS_INSTALLED:
        return [sys.executable, os.path.join(ROOT, program)]
    # -P: do not search the user's folder for modules
    module = program.removesuffix(".py").replace("/", ".")
    return [sys.executable, "-P", "-m", f"nanobatch.{module}"]


def install(extra: str, package: str) -> str:
    """Return how to install an extra: `extra` in a checkout, `package` for an installed nanobatch."""
    if not IS_INSTALLED:
        return f"pip install -e '.[{extra}]' in the checkout"
    pipx = f"pipx runpip nanobatch install '{package}'"
    return f"pip install '{package}' (with pipx: {pipx}; with uv: add --with '{package}')"
