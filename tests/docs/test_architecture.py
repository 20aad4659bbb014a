"""The architecture: which file may import which.

The plan comes first, as tables. The tests parse the source without running it, except for the function
that lists the files compared by ranks. A failing test names every file or line that breaks the plan.
"""

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quick import QUICK
from source import PACKAGES

from models.memory import sources

ROOT = Path(__file__).parents[2]
# A file or package on the left may import those on the right, and files of its own package.
MAY_IMPORT = {
    "base/*": "",
    "kernels/*": "base/*",
    "distributed/*": "kernels/* base/*",
    "models/*": "distributed/* kernels/* base/*",
    "text/*": "models/gguf_file base/*",
    "prefix": "",
    "request": "prefix",
    "sched": "request prefix",
    "state_places": "request prefix",
    "policies": "request sched",
    "prompt_lookup": "request",
    "kv": "kernels/*",
    "llama": "kv models/* kernels/*",
    "sampling_params": "base/*",
    "step_output": "base/*",
    "logprobs": "step_output kernels/*",
    "token_choice": "kernels/*",
    "sampling": "logprobs token_choice sampling_params kernels/*",
    "runner": "llama kv sampling logprobs sampling_params step_output request models/* kernels/*",
    "engine/*": """runner sampling_params step_output request sched prefix state_places prompt_lookup models/*
        distributed/* text/* kernels/* base/*""",
    "nanobatch": """runner sampling sampling_params request sched policies prompt_lookup engine/*
        models/* text/* kernels/* base/*""",
    "cli/*": "sampling_params engine/* models/* text/* distributed/environment kernels/* base/*",
    "benchmarks/*": """nanobatch kv llama sampling_params engine/* cli/* models/* text/* kernels/*
        distributed/* base/*""",
    "server/*": "sampling_params step_output request engine/* cli/* text/* base/*",
    "screen/*": "sampling_params request policies engine/* cli/* text/* base/*",
    "experiments/*": "screen/* benchmarks/* request sched policies engine/* models/* kernels/* base/*",
    "web/*": "request policies experiments/simulator",
    "demo/*": "nanobatch",
    "course/*": "cli/*",
    "setup": "kernels/build",
    "ask": "nanobatch sampling_params cli/* text/* distributed/environment base/*",
    "serve": "nanobatch sampling_params server/* cli/* engine/* distributed/environment kernels/* policies base/*",
    "tui": "nanobatch screen/* experiments/* serve cli/* engine/* distributed/environment kernels/* policies base/*",
    "bench": "benchmarks/* cli/* models/* distributed/environment policies base/*",
    "verify": "nanobatch benchmarks/* cli/* policies models/* distributed/environment kernels/* base/*",
}
WITHOUT_MLX = """sampling_params step_output request sched policies prefix prompt_lookup state_places
    engine/* base/* cli/* text/* server/* screen/* serve tui
    models/forward_cost distributed/environment experiments/simulator"""
NEEDS_MLX = (
    "engine/model_lifecycle engine/model_source engine/model_headers engine/disk_prefix_cache "
    "engine/roofline cli/model_list"
)
STANDARD_LIBRARY = {
    "request": "",
    "sched": "",
    "policies": "",
    "prefix": "",
    "prompt_lookup": "",
    "base/*": "",
    "distributed/environment": "",
    "cli/options": "",
    "experiments/simulator": "",
    "text/tool_formats": "",
    "text/tool_parser": "",
    "kernels/build": "",
    "kernels/library": "",
    "kernels/device": "mlx",
}


# MLX operations whose last bits differ between x86-64 and ARM, and the functions that may call them
# where the C library does not run
DIFFER = "tanh log1p expm1 arctan sinh cosh logaddexp logcumsumexp quantized_matmul gather_qmm"
MAY_DIFFER = {
    "models/ops.py capped",
    "kernels/packed.py _unpacked_by_mlx",
    "models/delta_net.py prepared",
}


# --- reading the source -------------------------------------------------------------------------


def names() -> list[str]:
    """Return the files of the plan except the demo's, without suffix: "nanobatch", "models/ops", ..."""
    folders = (".", *PACKAGES, "course", "server", "screen", "screen/*", "web")
    folders += ("benchmarks", "cli", "experiments")
    return [name for folder in folders for name in files_in(folder)]


@cache
def everything() -> list[str]:
    return names() + files_in("demo")


def files_in(folder: str) -> list[str]:
    return [
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in sorted(ROOT.glob(f"{folder}/*.py"))
        if path.name != "__init__.py"
    ]


@cache
def source(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


class Import(NamedTuple):
    module: str  # "nanobatch" or "models/ops"; for other packages the top-level name
    inside: bool  # inside a function


@cache
def imports(name: str, text: str | None = None) -> set[Import]:
    """Return everything that a file imports at any level, except for type checking (`if TYPE_CHECKING`)."""
    ours = set(everything())

    def resolve(parts: list[str]) -> str:
        for path in ("/".join(parts[:3]), "/".join(parts[:2]), parts[0], f"demo/{parts[0]}"):
            if path in ours:
                return path
        return parts[0]

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return  # never executed
        if isinstance(node, ast.Import):
            yield from (Import(resolve(alias.name.split(".")), inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split("/")[: -node.level] if node.level else []
            base = [*above, *(node.module.split(".") if node.module else [])]
            yield from (Import(resolve([*base, alias.name]), inside) for alias in node.names)
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return set(visit(ast.parse(source(name) if text is None else text), False))


@cache
def graph(inside: bool = True) -> dict[str, set[str]]:
    """Return what each of our files imports, anywhere or only outside functions."""
    return {
        name: {i.module for i in imports(name) if inside or not i.inside} for name in everything()
    }


def reached(edges: dict[str, set[str]], name: str) -> dict[str, list[str]]:
    """Return the files that a file imports, directly or indirectly, each with the chain of imports to it."""
    ways, line = {}, [[name]]
    for way in line:
        for module in sorted(edges.get(way[-1], ())):
            if module not in ways:
                ways[module] = [*way, module]
                line.append(ways[module])
    return ways


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split())


def fitting(pattern: str) -> list[str]:
    return [name for name in everything() if fnmatch(name, pattern)]


def allowed(name: str) -> str | None:
    """Return the files of ours that a file may import, or None if the plan does not list it."""
    for pattern, files in MAY_IMPORT.items():
        if fnmatch(name, pattern):
            return f"{files} {pattern}" if pattern.endswith("/*") else files
    return None


def forbidden(name: str, found: set[Import]) -> list[str]:
    """Return those of a file's imports that the plan does not allow."""
    ours, may = set(everything()), allowed(name) or ""
    return [
        f"{name} imports {module}{' inside a function' if inside else ''}"
        for module, inside in sorted(found)
        if module in ours and not matches(module, may)
    ]


def engine_names(name: str, text: str) -> list[str]:
    """Return where a file uses an underscored name of an engine, outside the class `Engine` itself."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.ClassDef) and (name, node.name) == ("nanobatch", "Engine"):
            return
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] in ("engine", "_engine"):
                yield f"{name}.py:{node.lineno} touches {owner}.{node.attr}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return list(visit(ast.parse(text)))


def report(offenders: list[str]) -> str:
    return "\n".join(["", *offenders])


# --- imports ------------------------------------------------------------------------------------


def test_every_file_has_its_place_in_the_plan():
    offenders = [f"{name}.py is not in the plan" for name in everything() if allowed(name) is None]
    assert not offenders, report(offenders)


def test_every_import_runs_downwards():
    offenders = [line for name in everything() for line in forbidden(name, imports(name))]
    assert not offenders, report(offenders)


def test_no_import_rule_is_unused():
    """Each dependency that the plan allows exists, so that a reader can rely on the plan."""
    offenders = [
        f"{importing} may import {imported}, and nothing does"
        for importing, allowed in MAY_IMPORT.items()
        for imported in allowed.split()
        if not any(
            fnmatch(i.module, imported) for name in fitting(importing) for i in imports(name)
        )
    ]
    assert not offenders, report(offenders)


def test_no_import_runs_in_a_circle():
    """Neither files nor packages import in a circle. Regression: `text` and `models` imported each other
    through one file each."""
    packages: dict[str, set[str]] = {}
    for name, imported in graph().items():
        own = packages.setdefault(name.partition("/")[0], set())
        own |= {each.partition("/")[0] for each in imported} - {name.partition("/")[0]}
    ways = {name: reached(packages, name) for name in packages}
    offenders = [" -> ".join(way[name]) for name, way in ways.items() if name in way]
    assert not offenders, report(offenders)
    ways = {name: reached(graph(), name) for name in everything()}
    offenders = [" -> ".join(way[name]) for name, way in ways.items() if name in way]
    assert not offenders, report(offenders)


def test_scheduler_and_first_frame_need_no_mlx():
    """Indirect imports count, too. Imports inside functions do not, because they happen later."""
    ways = {
        name: reached(graph(inside=False), name)
        for name in everything()
        if matches(name, WITHOUT_MLX) and not matches(name, NEEDS_MLX)
    }
    assert {"sched", "tui", "engine/handle"} <= ways.keys()
    offenders = [" -> ".join(way["mlx"]) for way in ways.values() if "mlx" in way]
    assert not offenders, report(offenders)


def test_lowest_layer_needs_no_packages():
    offenders = []
    for name, packages in ((n, p) for each, p in STANDARD_LIBRARY.items() for n in fitting(each)):
        free = {*everything(), *sys.stdlib_module_names, *packages.split()}
        offenders += [
            f"{name} imports {i.module}" for i in sorted(imports(name)) if i.module not in free
        ]
    assert not offenders, report(offenders)


def test_ranks_hash_every_source_of_a_step():
    """Ranks compare every source that a step runs, since different code would give wrong sums
    (`check_alike` in `models/memory.py`)."""
    compared = {path.relative_to(ROOT).as_posix() for path in sources()}
    runs = {
        f"{name}.py"
        for name in ("nanobatch", *reached(graph(), "nanobatch"))
        if name in everything()
    }
    assert {"nanobatch.py", "llama.py", "kv.py", "models/load.py"} <= runs
    assert runs | {"kernels/cpu_kernels.c"} <= compared, runs - compared
    assert not any(path.startswith(("tests/", "screen/", "server/")) for path in compared)


def calls_that_differ(name: str, text: str) -> set[str]:
    """Return the functions of a file that use an operation in `DIFFER`, as "FILE.py FUNCTION"."""
    return {
        f"{name}.py {function.name}"
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr in DIFFER.split()
        and ast.unparse(node.value) != "math"
    }


def test_no_processor_dependent_operation():
    """Regression: Gemma's soft cap used MLX's tanh, so the bits of answers differed between ARM and x86-64."""
    names = [name for name in ("nanobatch", *reached(graph(), "nanobatch")) if name in everything()]
    found = set().union(*(calls_that_differ(name, source(name)) for name in names))
    assert found == MAY_DIFFER
    assert calls_that_differ("x", "def f(x):\n    return mx.log1p(x) + math.cosh(1)") == {"x.py f"}


# --- the engine's own names ---------------------------------------------------------------------


def test_engine_internals_are_private():
    offenders = [line for name in everything() for line in engine_names(name, source(name))]
    assert not offenders, report(offenders)


def assigned(name: str, text: str) -> list[str]:
    """Return where a file assigns to a part of an engine, its scheduler, its runner or its slab."""
    parts = {"engine", "sched", "runner", "slab"}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            owner = re.split(r"\W+", ast.unparse(node.value))
            if parts & {*owner}:
                found.append(f"{name}.py:{node.lineno} assigns to {ast.unparse(node)}")
    return found


def test_screen_uses_engine_methods_only():
    """Regression: a page replaced a method of the runner and wrote into the slab, and the engine client set
    the scheduler's budget without the engine's lock."""
    screen = [name for name in everything() if name.startswith("screen/") or name == "tui"]
    offenders = [line for name in screen for line in assigned(name, source(name))]
    assert not offenders, report(offenders)


def test_quick_names_tests_that_exist():
    tests = ROOT / "tests"
    gone = []
    for line in QUICK:
        file, _, name = line.partition("::")
        path = tests / file
        if not path.exists() or f"def {name}" not in path.read_text():
            gone.append(line)
    assert not gone
