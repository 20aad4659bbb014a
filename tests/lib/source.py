"""Source code as text: what a file defines, and its tokens and lines of code."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ["base", "engine", "models", "kernels", "text", "distributed"]  # what the core uses
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def places(file: Path) -> set[str]:
    """The functions and classes of a file, methods with their class first."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (*functions, ast.ClassDef)):
            found |= {
                node.name,
                *(f"{node.name}.{part.name}" for part in node.body if isinstance(part, functions)),
            }
    return found


def code_tokens(text: str) -> list[tokenize.TokenInfo]:
    """All tokens but those of comments, docstrings and layout."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = set()  # lines of docstrings
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            prose |= set(range(docstring.lineno, docstring.end_lineno + 1))
    tokens = whole_strings(tokenize.generate_tokens(io.StringIO(text).readline))
    return [token for token in tokens if token.type not in NO_CODE and token.start[0] not in prose]


def whole_strings(tokens: Iterator[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """An f-string is one token, as in Python 3.11. Since 3.12 each of its parts is one."""
    for token in tokens:
        first = token
        depth = 0
        while (depth := depth + opens(token)) > 0:
            token = next(tokens)
        yield first if first is token else first._replace(end=token.end)


def opens(token: tokenize.TokenInfo) -> int:
    """1 for the start of an f-string, -1 for its end."""
    kind = tokenize.tok_name[token.type]
    return kind.endswith("STRING_START") - kind.endswith("STRING_END")


def lines_of_code(text: str) -> int:
    """Lines that hold a token, and are no docstring. (The README says how many the core has.)"""
    lines = set()
    for token in code_tokens(text):
        lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)
