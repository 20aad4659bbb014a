"""Whose modules run: ours, or files that were found before them, such as a student's `kv.py`. Our proofs are
about ours."""

import sys
from pathlib import Path

from base.installation import IS_INSTALLED, ROOT

PACKAGE = "nanobatch." if IS_INSTALLED else ""


def foreign() -> dict[str, Path]:
    """The modules that run in place of ours so far, and their files. (A package holds no code.)"""
    found = {}
    for name, module in sorted(sys.modules.items()):
        ours = Path(ROOT, f"{name.removeprefix(PACKAGE).replace('.', '/')}.py")
        if name.startswith(PACKAGE) and ours.is_file() and not hasattr(module, "__path__"):
            file = Path(getattr(module, "__file__", None) or ours).resolve()
            if file != ours:
                found[name] = file
    return found


def named() -> str:
    """For people; empty if all modules are ours."""
    files = foreign().values()
    folders = ", ".join(sorted({file.parent.name for file in files}))
    return f"{len(files)} module{'s' * (len(files) > 1)} of {folders}" if files else ""


def labelled(device: str) -> str:
    """What a program says of its device, and whose modules run."""
    return f"{device}, with {named()}" if named() else device
