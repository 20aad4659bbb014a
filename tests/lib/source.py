"""Source code as text: what a file defines, and how many lines of code it has."""

import ast
import io
import tokenize
from pathlib import Path


def places(file: Path) -> set[str]:
    """The functions and classes of a file, methods with their class in front."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (*functions, ast.ClassDef)):
            found |= {node.name, *(f"{node.name}.{part.name}" for part in node.body if isinstance(part, functions))}
    return found


def lines_of_code(text: str) -> int:
    """Lines that hold a token, and are no docstring. (The README says how many the core has.)"""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in no_code]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)
