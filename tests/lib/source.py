"""Source code as text: what a file defines."""

import ast
from pathlib import Path

PACKAGES = ["base", "engine", "models", "kernels", "text", "distributed"]  # used by the core


def places(file: Path) -> set[str]:
    """Return the names of a file's functions and classes, methods as Class.method."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (*functions, ast.ClassDef)):
            found |= {
                node.name,
                *(f"{node.name}.{part.name}" for part in node.body if isinstance(part, functions)),
            }
    return found
