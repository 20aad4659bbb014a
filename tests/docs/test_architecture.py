"""The architecture: which file may import which.

The plan stands first, as tables. The tests read the source, and run nothing of it but the list of
sources that ranks compare. A test that fails names every file or line that breaks the plan, not
only the first.
"""

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from quick import QUICK
from source import PACKAGES, code_tokens

from models.memory import CORE, sources

ROOT = Path(__file__).parents[2]
FUNCTION = 60  # the most lines of a function: a page
SHARE = 0.335  # of all tokens, those of the core and the packages below it at least
# The files on the left, one or a package, may import those on the right, and each other in a package.
MAY_IMPORT = {
    "prefix": "",
    "prompt_lookup": "sched",
    "sched": "prefix",
    "policies": "sched",
    "kv": "kernels/*",
    "sampling": "kernels/* runtime/output_types runtime/sampling_params",
    "llama": "kv models/* kernels/*",
    "setup": "kernels/build package",
    "package": "",
    "runner": "llama kv sampling sched prefix models/* kernels/* runtime/output_types runtime/sampling_params",
    "nanobatch": "runner sampling sched policies prompt_lookup runtime/* models/* text/* kernels/*",
    "kernels/*": "runtime/cgroup",
    "text/*": "runtime/sampling_params runtime/gguf_file",
    "runtime/terminal_chat": "runtime/terminal text/tool_formats text/tool_parser",
    "runtime/model_reload": "runtime/gguf_file kernels/* models/* distributed/* text/*",
    "runtime/slot_cache": "sched prefix runtime/* kernels/* models/*",
    "runtime/*": "sched",
    "distributed/*": "runtime/snapshot kernels/*",
    "models/model_finder": "models/* runtime/gguf_file kernels/* text/gguf_tokenizer",
    "models/*": "runtime/model_cost runtime/gguf_file distributed/* kernels/*",
    "analysis/*": "sched policies runtime/* kernels/*",
    "course/overlay": "",
    "course/handout": "course/*",
    "server/*": "runtime/* text/* sched",
    "web/*": "sched policies analysis/simulator",
    "benchmarks/quality": "kv llama models/* kernels/* benchmarks/* text/tokenizer",
    "benchmarks/*": "nanobatch runtime/* models/* kernels/* analysis/* distributed/rendezvous",
    "demo/*": "nanobatch",
    "ask": "nanobatch runtime/* models/model_finder text/*",
    "serve": "server/* runtime/* kernels/blas_preload text/sandbox policies",
    "tui": "screen/* serve runtime/* kernels/* policies",
    "bench": "benchmarks/* runtime/* models/* policies",
    "verify": "nanobatch policies runtime/* kernels/* analysis/* models/* text/sandbox",
}
ANY_FILE_MAY_IMPORT = "course/overlay runtime/validation runtime/files runtime/cli"
# What a program imports inside a function: `tui.py` shows a frame, and `serve.py` binds its port,
# before MLX is loaded.
INSIDE_A_FUNCTION = {
    "serve": "nanobatch",
    "tui": "nanobatch",
    "screen/engine_client": "analysis/engine_probes",
}
# Each file of the screen may import those of the lines below it, and these.
SCREEN = """
    app
    commands recording
    keys terminal widgets
    pages/tour
    pages/tour_scenes
    pages/*
    page draw/timeline draw/answers
    draw/slots draw/status draw/step draw/charts
    state
    chat_history
    latency_breakdown
    policy_runs experiment
    stats
    remote_client
    step_columns
    engine_client draw/canvas draw/markdown
    engine_view workload
    draw/style draw/layout
"""
SCREEN_MAY_IMPORT = """runtime/* analysis/answer_diff analysis/step_cost_model
    analysis/fitted_step_times analysis/simulator
    analysis/cpu_contention text/tool_parser server/access_log server/watch_frames sched policies"""
WITHOUT_MLX = """sched policies prefix prompt_lookup runtime/* text/* server/* screen/* serve tui
    analysis/step_cost_model analysis/fitted_step_times analysis/simulator course/overlay"""
NEEDS_MLX = "runtime/model_reload runtime/slot_cache"
STANDARD_LIBRARY = {
    "sched": "",
    "policies": "",
    "prefix": "",
    "prompt_lookup": "",
    "course/overlay": "",
    "runtime/validation": "",
    "runtime/files": "",
    "runtime/cli": "",
    "analysis/simulator": "",
    "text/tool_formats": "",
    "text/tool_parser": "",
}


# And this package
STANDARD_LIBRARY |= {
    "kernels/blas_preload": "",
    "kernels/build": "",
    "kernels/matmul_library": "",
    "kernels/mlx": "mlx",
}


# Operations of MLX whose last bits differ between x86-64 and ARM, and who may call them: what runs
# where the C library does not
DIFFER = "tanh log1p expm1 arctan sinh cosh logaddexp logcumsumexp quantized_matmul gather_qmm"
MAY_DIFFER = {"models/ops.py capped", "kernels/packed.py _unpacked_by_mlx"}


# --- reading the source -------------------------------------------------------------------------


def names() -> list[str]:
    """All files but the demo's: "nanobatch", "models/ops" and so on, without the ending."""
    folders = (".", *PACKAGES, "course", "server", "screen", "screen/*", "web")
    folders += ("benchmarks",)
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


def length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


class Import(NamedTuple):
    module: str  # "nanobatch" or "models/ops", or of other people's packages the first name
    inside: bool  # of a function


@cache
def imports(name: str, text: str | None = None) -> set[Import]:
    """All that a file imports, wherever it stands."""
    ours = set(everything())

    def resolve(parts: list[str]) -> str:
        for path in ("/".join(parts[:3]), "/".join(parts[:2]), parts[0], f"demo/{parts[0]}"):
            if path in ours:
                return path
        return parts[0]

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
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
    """Each file of ours and what it imports: in any place, or only outside of functions."""
    return {
        name: {i.module for i in imports(name) if inside or not i.inside} for name in everything()
    }


def reached(edges: dict[str, set[str]], name: str) -> dict[str, list[str]]:
    """What a file imports, itself or through others: each with the way that leads to it."""
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
    """What a file may import of ours; None if the plan does not know it."""
    rows = [[f"screen/{other}" for other in line.split()] for line in SCREEN.split("\n")]
    for i, row in enumerate(rows):
        if matches(name, " ".join(row)):
            return " ".join([SCREEN_MAY_IMPORT, *chain(*rows[i + 1 :])])
    for pattern, files in MAY_IMPORT.items():
        if fnmatch(name, pattern):
            return f"{files} {pattern}" if pattern.endswith("/*") else files
    return None


def forbidden(name: str, found: set[Import]) -> list[str]:
    """Those of a file's imports that the plan does not allow."""
    ours, may = set(everything()), f"{allowed(name) or ''} {ANY_FILE_MAY_IMPORT}"
    later = INSIDE_A_FUNCTION.get(name, "")
    return [
        f"{name} imports {module}{' inside a function' if inside else ''}"
        for module, inside in sorted(found)
        if module in ours and not matches(module, f"{may} {later}" if inside else may)
    ]


def engine_names(name: str, text: str) -> list[str]:
    """Where a file touches an underscored name of an engine, outside the class `Engine` itself."""

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


# --- sizes --------------------------------------------------------------------------------------


def test_no_function_is_longer_than_a_page():
    lengths = {}
    for name in names():
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths[f"{name}.py:{node.lineno} {node.name}"] = length(node)
    assert len(lengths) > 100
    longest = max(lengths, key=lengths.get)
    print(f"longest function: {longest}, {lengths[longest]} lines of {FUNCTION}")
    offenders = [
        f"{place} has {lines} lines" for place, lines in lengths.items() if lines > FUNCTION
    ]
    assert not offenders, report(offenders)


def test_core_is_a_third_of_the_programs():
    """The screen once had five times the code of the engine."""
    tokens = {name: len(code_tokens(source(name))) for name in names() if "web/" not in name}
    engine = sum(
        many
        for name, many in tokens.items()
        if name in (*CORE, "course/overlay") or name.split("/")[0] in PACKAGES
    )
    share = engine / sum(tokens.values())
    print(f"core and packages: {engine:,} tokens of {sum(tokens.values()):,}, {share:.1%}")
    assert len(tokens) > 80
    assert share >= SHARE


# --- imports ------------------------------------------------------------------------------------


def test_every_file_has_its_place_in_the_plan():
    offenders = [f"{name}.py is not in the plan" for name in everything() if allowed(name) is None]
    assert not offenders, report(offenders)


def test_every_import_runs_downwards():
    offenders = [line for name in everything() for line in forbidden(name, imports(name))]
    assert not offenders, report(offenders)


def test_no_import_rule_is_unused():
    """An arrow that is only on paper tells a reader of a dependency that does not exist."""
    screen = {"screen/*": SCREEN_MAY_IMPORT}
    offenders = [
        f"{importing} may import {imported}, and nothing does"
        for plan in (MAY_IMPORT, screen, INSIDE_A_FUNCTION)
        for importing, allowed in plan.items()
        for imported in allowed.split()
        if not any(
            fnmatch(i.module, imported) for name in fitting(importing) for i in imports(name)
        )
    ]
    assert not offenders, report(offenders)


def test_no_import_runs_in_a_circle():
    ways = {name: reached(graph(), name) for name in everything()}
    offenders = [" -> ".join(way[name]) for name, way in ways.items() if name in way]
    assert not offenders, report(offenders)


def test_scheduler_and_first_frame_need_no_mlx():
    """Not even through what they import. What they import inside a function, they import later."""
    ways = {
        name: reached(graph(inside=False), name)
        for name in everything()
        if matches(name, WITHOUT_MLX) and not matches(name, NEEDS_MLX)
    }
    assert {"sched", "tui", "runtime/handle"} <= ways.keys()
    offenders = [" -> ".join(way["mlx"]) for way in ways.values() if "mlx" in way]
    assert not offenders, report(offenders)


def test_no_import_is_for_types_alone():
    """Where a file may not import another, not even for its types, a protocol says what it
    needs."""
    names = {*everything()} - {"package"}  # which writes an `__init__.py` that editors can follow
    offenders = [f"{name}.py" for name in sorted(names) if "TYPE_" + "CHECKING" in source(name)]
    assert not offenders, report(offenders)


def test_lowest_layer_needs_no_packages():
    offenders = []
    for name in (name for name in everything() if name in STANDARD_LIBRARY):
        free = {*everything(), *sys.stdlib_module_names, *STANDARD_LIBRARY[name].split()}
        offenders += [
            f"{name} imports {i.module}" for i in sorted(imports(name)) if i.module not in free
        ]
    assert not offenders, report(offenders)


def test_ranks_hash_every_source_of_a_step():
    """Ranks whose sources differ would add up nonsense (`check_alike` in `models/memory.py`)."""
    compared = {path.relative_to(ROOT).as_posix() for path in sources()}
    runs = {
        f"{name}.py"
        for name in ("nanobatch", *reached(graph(), "nanobatch"))
        if name in everything()
    }
    assert {"nanobatch.py", "llama.py", "kv.py", "models/load.py"} <= runs
    assert runs | {"kernels/matmul.c"} <= compared, runs - compared
    assert not any(path.startswith(("tests/", "screen/", "server/")) for path in compared)


def calls_that_differ(name: str, text: str) -> set[str]:
    """The functions of a file that call one of these operations, each behind the file's name."""
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
    """Gemma's cap was MLX's tanh, and answers on ARM had other bits than on x86-64."""
    names = [name for name in ("nanobatch", *reached(graph(), "nanobatch")) if name in everything()]
    found = set().union(*(calls_that_differ(name, source(name)) for name in names))
    assert found == MAY_DIFFER
    assert calls_that_differ("x", "def f(x):\n    return mx.log1p(x) + math.cosh(1)") == {"x.py f"}


# --- the engine's own names ---------------------------------------------------------------------


def test_engine_internals_are_private():
    offenders = [line for name in everything() for line in engine_names(name, source(name))]
    assert not offenders, report(offenders)


def assigned(name: str, text: str) -> list[str]:
    """Where a file assigns to a part of an engine, of its scheduler, its runner or its slab."""
    parts = {"engine", "sched", "runner", "slab"}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            owner = re.split(r"\W+", ast.unparse(node.value))
            if parts & {*owner}:
                found.append(f"{name}.py:{node.lineno} assigns to {ast.unparse(node)}")
    return found


def test_screen_uses_engine_methods_only():
    """A page swapped a method of the runner and wrote into the slab, and the room set the
    scheduler's budget without the engine's lock."""
    screen = [name for name in everything() if name.startswith("screen/") or name == "tui"]
    assert len(screen) > 30
    offenders = [line for name in screen for line in assigned(name, source(name))]
    assert not offenders, report(offenders)


def test_quick_covers_every_package():
    tests = ROOT / "tests"
    gone = []
    for line in QUICK:
        file, _, name = line.partition("::")
        path = tests / file
        if not path.exists() or f"def {name}" not in path.read_text():
            gone.append(line)
    assert not gone
    rooms = {path.parent.name for path in tests.glob("*/test_*.py")}
    assert rooms == {line.partition("/")[0] for line in QUICK}
