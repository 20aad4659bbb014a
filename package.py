"""Make the package `nanobatch` of the checkout's modules, for a wheel or for an editable install.

In the checkout a module has a short name, such as `kv`: Python searches a program's own folder first.
Installed under such names, `sched` would hide behind the standard library's, and `models` might hide
somebody else's. So a wheel has one package, and in each file `from kv import Slab` is rewritten to
`from nanobatch.kv import Slab`. `nanobatch.py` becomes `nanobatch/_engine.py`, since the package has its
name. An editable install does the same to each module while it is imported.

The modules are found by looking at the tree. What cannot be rewritten safely, such as a module's name
in a string, is an error that names the line: write `__name__`, or another form of the import.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cached_property
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path

NAME = "nanobatch"
ENGINE = "_engine"  # what nanobatch.py is called in the package
BUILD = ("setup.py", "package.py")
LEFT_OUT = ("course", "tests")
# Of folders that are no packages, or are left out
KEPT = ("course/__init__.py", "course/overlay.py", "docs/make/page.py")
DATA = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/bench-15m.json", "demo/model/*")
NAMES_THE_CHECKOUT = "course/overlay.py"  # it runs there alone
IMPORT_IN_TEXT = re.compile(r"(?:^|[;\n])\s*(?:from\s+(\w+)[\w.]*\s+import|import\s+(\w+))\b")
IMPORTERS = ("import_module", "__import__", "find_spec")
INIT = '''\
"""The LLM serving engine you can read in an afternoon and watch while it runs.

The engine, and MLX with it, is loaded with the first of its names: `from nanobatch import Engine`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nanobatch._engine import {names}

__version__ = "{version}"
__all__ = {all}


def __getattr__(name: str) -> object:
    if not name[:1].isupper():  # modules are in lower case; old names of classes are not in __all__
        raise AttributeError(f"module 'nanobatch' has no attribute {{name!r}}")
    from nanobatch import _engine

    return getattr(_engine, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
'''
MAIN = '''\
"""`python -m nanobatch` is the command `nanobatch`."""

from nanobatch.cli.command import main

main()
'''
EDITABLE = '''\
"""An editable install: the modules are those of the checkout, as they are now."""

from importlib.util import module_from_spec, spec_from_file_location

_spec = spec_from_file_location("_nanobatch_package", {file!r})
_package = module_from_spec(_spec)
_spec.loader.exec_module(_package)
exec(_package.open_checkout())
'''


class Tree:
    """The checkout: what of it the package holds, and how its imports are rewritten."""

    def __init__(self, root: Path):
        self.root = root

    @cached_property
    def files(self) -> list[str]:
        """The Python files that the package holds."""
        found = [*self.root.glob("*.py"), *(self.root / each for each in KEPT)]
        for init in self.root.glob("*/__init__.py"):
            if init.parent.name not in LEFT_OUT:
                found += init.parent.rglob("*.py")
        names = {path.relative_to(self.root).as_posix() for path in found}
        return sorted(names - {*BUILD})

    @cached_property
    def modules(self) -> set[str]:
        return {module_of(file) for file in self.files}

    @cached_property
    def tops(self) -> set[str]:
        """The first names of all modules in the tree, also of those that are left out."""
        modules = {path.stem for path in self.root.glob("*.py")}
        return modules | {path.parent.name for path in self.root.glob("*/__init__.py")}

    def is_ours(self, module: str) -> bool:
        return module.partition(".")[0] in self.tops

    def data(self) -> Iterator[str]:
        """The files next to the code, such as cpu_kernels.c and the page's scripts."""
        folders = {file.partition("/")[0] for file in self.files if file.endswith("/__init__.py")}
        folders -= {*LEFT_OUT}
        patterns = [*DATA, *(f"{folder}/**/*" for folder in sorted(folders))]
        for path in sorted({path for each in patterns for path in self.root.glob(each)}):
            if path.is_file() and path.suffix not in (".py", ".pyc", ".so"):
                yield path.relative_to(self.root).as_posix()

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """All files of the package, and what they hold."""
        yield "__init__.py", self.init().encode()
        yield "__main__.py", MAIN.encode()
        for file in self.files:
            text = self.rewritten(self.text(file), file)
            yield file.replace(f"{NAME}.py", f"{ENGINE}.py"), text.encode()
        for file in self.data():
            yield file, (self.root / file).read_bytes()
        for file in self.run_by_the_page():
            yield f"web/python/{file}", (self.root / file).read_bytes()

    def text(self, file: str) -> str:
        return (self.root / file).read_text(encoding="utf-8")

    def init(self) -> str:
        nodes = ast.parse(self.text(f"{NAME}.py")).body
        (names,) = (ast.literal_eval(each.value) for each in nodes if "__all__" in assigned(each))
        version = tomllib.loads(self.text("pyproject.toml"))["project"]["version"]
        return INIT.format(names=", ".join(names), all=names, version=version)

    def run_by_the_page(self) -> list[str]:
        """`web/*.py` and all that it imports: in a browser modules have their short names."""
        files = [file for file in self.files if re.fullmatch(r"web/\w+\.py", file)]
        for file in files:  # it grows while we look
            for _, module, names in imports_in(ast.parse(self.text(file), file)):
                found = {module, *(f"{module}.{name}" for name in names)} & self.modules
                needed = [each for each in self.files if module_of(each) in found]
                files += [each for each in needed if each not in files]
        return [file for file in files if not file.endswith("__init__.py")]

    # --- rewriting ------------------------------------------------------------------------------

    def rewritten(self, text: str, file: str) -> str:
        """The same lines, with the imports of our modules from the package."""
        parsed = ast.parse(text, file)
        if file != NAMES_THE_CHECKOUT:
            self.check_strings(parsed, file)
        lines = text.split("\n")
        found = [(node, module, names) for node, module, names in imports_in(parsed)]
        found.sort(key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True)
        for node, module, names in found:
            if self.is_ours(module):
                self.check(module, names, f"{file}:{node.lineno}")
                self.rewrite(lines, node, module, f"{file}:{node.lineno}")
        return "\n".join(lines)

    def check(self, module: str, names: list[str], where: str) -> None:
        """What an installed module imports is in the package."""
        named = {f"{module}.{name}" for name in names} & self.modules
        is_package = (self.root / module.replace(".", "/")).is_dir()
        if module not in self.modules or (is_package and len(named) < len(names)):
            wanted = f"{', '.join(names)} of {module}" if names else module
            raise ValueError(f"{where} imports {wanted}, which the package does not hold")

    def rewrite(self, lines: list[str], node: ast.stmt, module: str, where: str) -> None:
        line = lines[node.lineno - 1].encode()
        before, rest = line[: node.col_offset].decode(), line[node.col_offset :].decode()
        if isinstance(node, ast.ImportFrom):
            old, new = f"from {module} ", f"from {self.renamed(module)} "
        else:
            old, new = self.whole_import(node, where)
        if not rest.startswith(old):
            raise ValueError(f"{where}: write the import with one space, and without a backslash")
        lines[node.lineno - 1] = before + new + rest.removeprefix(old)

    def whole_import(self, node: ast.Import, where: str) -> tuple[str, str]:
        """`import kv`, or `import models.ops as ops`: as written, and from the package."""
        alias = node.names[0]
        if len(node.names) > 1 or ("." in alias.name and not alias.asname):
            raise ValueError(f"{where}: import {alias.name} in a line of its own, by `from`")
        parent, _, name = self.renamed(alias.name).rpartition(".")
        known_as = alias.asname or alias.name
        new = f"from {parent} import {name}" + (f" as {known_as}" if known_as != name else "")
        return ast.unparse(node), new

    def renamed(self, module: str) -> str:
        return f"{NAME}.{ENGINE if module == NAME else module}"

    def check_strings(self, parsed: ast.Module, file: str) -> None:
        """A string that names a module of ours would still name it by its short name."""
        prose = {id(node.value) for node in ast.walk(parsed) if isinstance(node, ast.Expr)}
        for node in ast.walk(parsed):
            names = []
            if isinstance(node, ast.Call) and node.args and called(node) in IMPORTERS:
                names = [getattr(node.args[0], "value", "")]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) in prose:
                    continue
                found = IMPORT_IN_TEXT.findall(node.value)
                names = [name for each in found for name in each if name not in ("", NAME)]
                names += [node.value] if node.value in self.modules and "." in node.value else []
            for name in names:
                if isinstance(name, str) and self.is_ours(name):
                    where = f"{file}:{node.lineno}"
                    raise ValueError(f"{where}: a string names the module {name}; use __name__")


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def assigned(node: ast.stmt) -> list[str]:
    return [ast.unparse(each) for each in node.targets] if isinstance(node, ast.Assign) else []


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def imports_in(parsed: ast.Module) -> Iterator[tuple[ast.stmt, str, list[str]]]:
    """Each absolute import: its module, and the names that are taken from it."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield node, node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, []


# --- an editable install ------------------------------------------------------------------------


class Rewriting(SourceFileLoader):
    """Read a module of the checkout as one of the package."""

    tree: Tree

    def source_to_code(self, data: bytes, path: str, *rest, **how):
        file = Path(path).relative_to(self.tree.root).as_posix()
        text = self.tree.rewritten(decode_source(data), file)
        return super().source_to_code(text, path, *rest, **how)

    def path_stats(self, path: str):
        """The bytecode in __pycache__ belongs to the modules with short names."""
        raise OSError


class Checkout:
    """Finds the modules of the package in the checkout."""

    def __init__(self, tree: Tree):
        self.tree = tree

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != NAME or not module or module == "__main__":
            return None
        place = self.tree.root / (NAME if module == ENGINE else module.replace(".", "/"))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                loader = Rewriting(name, str(file))
                loader.tree = self.tree
                folders = [str(place)] if file.name == "__init__.py" else None
                how = {"loader": loader, "submodule_search_locations": folders}
                return spec_from_file_location(name, file, **how)
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations.append(str(place))
        return spec if place.is_dir() else None


def open_checkout() -> str:
    """Find the package's modules in this checkout. Return the code of its `__init__.py`."""
    tree = Tree(Path(__file__).resolve().parent)
    sys.meta_path.insert(0, Checkout(tree))
    return tree.init()
