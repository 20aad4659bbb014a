"""Find modules that run in place of ours because Python found them first, such as a student's `kv.py`. Our
guarantees hold only for our own modules."""

import sys
from functools import cache
from pathlib import Path

from base.installation import IS_INSTALLED, ROOT

PACKAGE = "nanobatch." if IS_INSTALLED else ""


def foreign() -> dict[str, Path]:
    """Return the modules loaded so far in place of ours, and their files. Packages are skipped, because they
    contain no code."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        ours = file_of_ours(name)
        file = getattr(module, "__file__", None)
        if ours and file and file != str(ours) and not hasattr(module, "__path__"):
            file = Path(file).resolve()
            if file != ours:
                found[name] = file
    return found


@cache  # called for a thousand modules, several times
def file_of_ours(module: str) -> Path | None:
    """Return our file for a module of this name, or None."""
    file = Path(ROOT, f"{module.removeprefix(PACKAGE).replace('.', '/')}.py")
    return file if module.startswith(PACKAGE) and file.is_file() else None


def named() -> str:
    """Return a phrase such as "2 modules of my_folder"; empty if all modules are ours."""
    files = foreign().values()
    folders = ", ".join(sorted({file.parent.name for file in files}))
    return f"{len(files)} module{'s' * (len(files) > 1)} of {folders}" if files else ""


def labelled(device: str) -> str:
    """Return the name of the device, with a note if some modules are not ours."""
    modules = named()
    return f"{device}, with {modules}" if modules else device
