"""A checkout or an installed package, and what depends on it: the version, what
to type, how to start one of our programs, how to install an extra."""

import os
import shlex
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
IS_INSTALLED = __name__.startswith(
    "nanobatch."
)  # from a wheel; an editable install is the checkout
is_command = False  # set by the command `nanobatch`, which an editable install has, too


def version() -> str:
    """The versions of nanobatch, MLX, Python and the system: the first line of a bug report."""
    import platform  # these are imported here, because most runs need none of them
    from importlib import metadata

    try:
        mlx = f"mlx {metadata.version('mlx')}"
    except metadata.PackageNotFoundError:
        mlx = "no mlx"
    python = f"Python {platform.python_version()}"
    system = f"{platform.system()} {platform.machine()}"
    return f"nanobatch {version_number()} ({mlx}, {python}, {system})"


def version_number() -> str:
    """The version, from `pyproject.toml` or the package's metadata."""
    import tomllib
    from importlib import metadata

    if IS_INSTALLED:
        return metadata.version("nanobatch")
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        return tomllib.load(file)["project"]["version"]


def command(program: str, *arguments: str) -> str:
    """The command line of one of our programs, such as serve.py: in a checkout, or where there is the
    command `nanobatch`."""
    word = os.path.basename(program).removesuffix(".py").replace("tui", "screen")
    start = ["nanobatch", word] if IS_INSTALLED or is_command else ["python", program]
    return shlex.join([*start, *arguments])


def start(program: str) -> list[str]:
    """The command that starts one of our programs as this process was started."""
    if not IS_INSTALLED:
        return [sys.executable, os.path.join(ROOT, program)]
    # -P: modules in the user's folder are not searched first
    module = program.removesuffix(".py").replace("/", ".")
    return [sys.executable, "-P", "-m", f"nanobatch.{module}"]


def install(extra: str, package: str) -> str:
    """The command that installs an extra: in a checkout, or next to an installed package."""
    if not IS_INSTALLED:
        return f"pip install -e '.[{extra}]' in the checkout"
    pipx = f"pipx runpip nanobatch install '{package}'"
    return f"pip install '{package}' (with pipx: {pipx}; with uv: add --with '{package}')"
