"""Whose modules run: ours, or files that were found before them, such as a student's `kv.py`. Our proofs are
about ours."""

import sys
from functools import cache
from pathlib import Path

from base.installation import IS_INSTALLED, ROOT

PACKAGE = "nanobatch." if IS_INSTALLED else ""


def foreign() -> dict[str, Path]:
    """The modules that run in place of ours so far, and their files. (A package holds no code.)"""
    found = {}
    for name, module in sorted(sys.modules.items()):
        ours = file_of_ours(name)
        file = getattr(module, "__file__", None)
        if ours and file and file != str(ours) and not hasattr(module, "__path__"):
            file = Path(file).resolve()
            if file != ours:
                found[name] = file
    return found


@cache  # a program asks of a thousand modules, several times
def file_of_ours(module: str) -> Path | None:
    """Our file for a module of this name, if there is one."""
    file = Path(ROOT, f"{module.removeprefix(PACKAGE).replace('.', '/')}.py")
    return file if module.startswith(PACKAGE) and file.is_file() else None


def named() -> str:
    """A phrase that names them; empty if all modules are ours."""
    files = foreign().values()
    folders = ", ".join(sorted({file.parent.name for file in files}))
    return f"{len(files)} module{'s' * (len(files) > 1)} of {folders}" if files else ""


def labelled(device: str) -> str:
    """The device as a program names it, with the modules that are not ours."""
    modules = named()
    return f"{device}, with {modules}" if modules else device
