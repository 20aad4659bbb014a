"""Everything that the docs mention exists, the programs accept the printed commands, and the Python code runs."""

import io
import re
import shlex
import subprocess
from contextlib import redirect_stdout
from fnmatch import fnmatch
from pathlib import Path

import pytest
from long_forms import IS_LONG

import ask
import bench
import serve
import tui
from docs.make import tables
from models.config import Config
from models.families import FAMILIES
from models.memory import slab_nbytes
from models.rope import Rope
from nanobatch import Engine, SamplingParams

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
FILES = (ROOT / "docs" / "files.md").read_text()
GLOSSARY = (ROOT / "GLOSSARY.md").read_text()
PATH, *PACKAGES, REST = re.split(r"^### ", FILES, flags=re.MULTILINE)
LIFE = (ROOT / "docs" / "life.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
SLOTS = (ROOT / "docs" / "slots.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()
PYTHON = (ROOT / "docs" / "python.md").read_text()
SERVER = (ROOT / "docs" / "server.md").read_text()
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text()
SCREEN = (ROOT / "docs" / "screen.md").read_text()
USE = SCREEN + COMMAND_LINE + SERVER + PYTHON
PAST = ("CHANGELOG.md", "history.md")  # these name programs that have moved since
ROOMS = [
    "base",
    "benchmarks",
    "cli",
    "distributed",
    "engine",
    "experiments",
    "kernels",
    "models",
    "screen",
    "server",
    "text",
    "web",
]
MODULES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
MODULES = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.py"), *MODULES)]


def test_files_in_the_pages_exist():
    named = set(
        re.findall(
            r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`", README + PATH + REST + USE + SLOTS + CONTRIBUTING
        )
    )
    assert {"nanobatch.py", "kv.py", "sched.py", "models/"} <= named
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing, missing


def test_each_term_of_the_glossary_names_a_file_and_classes_that_exist():
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* \| (.+?) \| `(\w+(?:/\w+)*\.(?:py|c))` \|", GLOSSARY, re.M
    )
    assert len(rows) > 40
    assert not [(term, file) for term, _, file in rows if not (ROOT / file).is_file()]
    sources = "\n".join((ROOT / name).read_text() for name in MODULES)
    for term, meaning, _ in rows:
        for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", meaning):
            owner, _, method = name.partition(".")
            assert re.search(rf"^class {owner}\b", sources, re.M), (term, name)
            assert not method or f"def {method}(" in sources, (term, name)


def test_answering_places_exist():
    found = re.findall(r"`((?:Scheduler|Engine|Runner|RunningStep|Window)\.\w+)`", LIFE + SLOTS)
    assert len(found) > 8
    for name in found:
        owner, method = name.split(".")
        texts = [(ROOT / name).read_text() for name in MODULES]
        assert any(f"class {owner}" in text and f"def {method}(" in text for text in texts), name


def test_reading_path_is_complete():
    """Each package is listed in docs/files.md, and each file of the root there or in the README."""
    rooms = {f"{Path(name).parent.as_posix()}/" for name in MODULES if "/" in name}
    assert {"engine/", "models/", "server/", "screen/pages/"} <= rooms
    missing = [name for name in sorted(rooms) if f"`{name}`" not in FILES]
    missing += [name for name in MODULES if "/" not in name and f"`{name}`" not in README + FILES]
    assert not missing, missing


@pytest.mark.parametrize("section", PACKAGES, ids=lambda section: section.split("`")[1])
def test_each_package_of_the_map_has_the_files_that_are_there(section):
    """Each table lists exactly the files of its package."""
    folder = section.split("`")[1]
    named = set(re.findall(r"`(\w+\.\w+)`", section.split("|\n", 1)[1]))
    there = {path.name for ending in ("py", "c") for path in (ROOT / folder).glob(f"*.{ending}")}
    assert named == there - {"__init__.py"}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub creates them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("course/**/*.md")):
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), (page.name, target)
            assert not anchor or anchor in anchors(there), (page.name, target, anchor)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a checkout of the repository")
def test_root_has_no_stray_files():
    """Regression: a command had left two empty files in the root, and a commit included them."""
    said = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [ROOT / name for name in said.stdout.splitlines() if "/" not in name]
    assert len(tracked) > 10
    assert not [path.name for path in tracked if path.exists() and not path.stat().st_size]
    rooms = {f"{name.partition('/')[0]}/" for name in said.stdout.splitlines() if "/" in name}
    names = [*(path.name for path in tracked), *rooms]
    assert not [name for name in names if name not in README + FILES]


def test_programs_in_the_pages_exist():
    """Every program in a `python PATH` command of the docs or the source exists."""
    rooms = ("course", "demo", "docs", "tests", *ROOMS)
    texts = [*ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "pyproject.toml"]
    texts += [path for room in rooms for path in (ROOT / room).rglob("*.*")]
    told = {}
    for path in texts:
        if path.suffix in (".md", ".py", ".js", ".toml") and path.name not in PAST:
            for name in re.findall(r"python ((?:\w+/)+\w+\.py)", path.read_text()):
                told[name] = path.relative_to(ROOT)
    assert {"docs/make/page.py", "tests/lib/parrot.py", "course/ladder/2_cache.py"} <= told.keys()
    gone = {name: path for name, path in told.items() if not (ROOT / name).is_file()}
    assert not gone


def test_commands_leave_the_checkout_clean():
    """Regression: the docs print `--record run.json`, and an empty `run.json` was tracked."""
    ignored = re.findall(r"^/(\S+)$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "docs" / "index.html"]
    programs = [*ROOT.glob("*.py"), *ROOT.glob("docs/make/*.py")]
    texts = " ".join(path.read_text() for path in (*pages, *programs))
    options = "--(?:record|json|screenshot)"
    written = re.findall(rf"(?:{options}|' >) (\w+\.(?!py)\w+)", texts)
    written += re.findall(r"python docs/make/(?:page|plot)\.py (?:\w+\.\w+ )+(\w+\.\w+)", texts)
    assert {"run.json", "run.svg", "out.html", "hosts.json"} <= set(written)
    assert not [name for name in written if not any(fnmatch(name, each) for each in ignored)]


@pytest.mark.parametrize(
    ("program", "pages", "least"),
    [
        (ask, README + USE, 3),
        (tui, README + USE + FILES, 5),
        (serve, README + USE, 2),
        (bench, SPEED, 5),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_commands_in_the_pages(program, pages, least, monkeypatch, tmp_path):
    # Commands may name peers that are not installed
    monkeypatch.setattr(bench, "obstacle", lambda *_: None)
    # The docs compare two checkouts next to each other
    for checkout in (tmp_path / "now", tmp_path / "before"):
        (checkout / "docs").mkdir(parents=True)
        (checkout / "bench.py").touch()
    monkeypatch.chdir(tmp_path / "now")
    name = program.__name__
    found = re.findall(rf"(?<!')python {name}\.py\b((?:[^\n`]*\\\n)*[^\n`]*)", pages)
    commands = [shlex.split(each.replace("\\\n", "").partition("#")[0]) for each in found]
    assert len(commands) >= least
    for words in commands:
        if not {"--version", "--help"} & {*words}:
            program.parse_arguments(words)


def test_flags_of_the_server_page(capsys):
    flags = set(re.findall(r"`(--[a-z-]+)`", SERVER))
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--help"])
    assert "--api-key" in flags
    assert flags <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


@pytest.mark.skipif(IS_LONG, reason="the tables count what the short forms try")
def test_tables_are_generated():
    """`python docs/make/tables.py` regenerates them."""
    made = [found for page in tables.pages() for found in tables.MADE.findall(page.read_text())]
    assert len(made) >= 5
    for mark, _, text in made:
        assert tables.made_anew(mark + text) == mark + text, (
            f"{mark.strip()} is stale: python docs/make/tables.py"
        )


def test_pictures_exist_and_show_text():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    named = r"!\[.+?\]\((.+?)\)|(?:src|srcset)=\"(.+?)\""
    pictures = {
        page.parent / (name or other)
        for page in pages
        for name, other in re.findall(named, page.read_text())
    }
    assert len(pictures) >= 5
    for picture in pictures:
        assert picture.read_text().count("<text") > 5, picture


def test_python_of_the_use_page_runs(capsys):
    codes = re.findall(r"```python\n(.*?)```", USE, re.DOTALL)
    assert len(codes) == 3
    for code in codes:
        exec(code, {})
    said = capsys.readouterr().out
    assert "2 slots of 512 tokens" in said and re.search(r"^0\.\d+$", said, re.M)
    assert "ttft_s" in said and re.search(r"^[0-9]{3}-[a-z]{2}\n(yes|no)\n", said, re.M)


def test_python_of_the_slots_page_prints_its_output():
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", SLOTS, re.DOTALL)
    with redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert out.getvalue() == printed


def test_slots_page_equals_the_engine():
    demo = {"layers": 6, "Hkv": 2, "Dh": 32, "itemsize": 2}
    llama = {"layers": 16, "Hkv": 8, "Dh": 64, "itemsize": 2}
    for slots, length in ((8, 1024), (32, 256), (64, 128)):
        assert slab_nbytes(slots=slots, length=length, **demo) == pytest.approx(
            12 * 2**20, rel=0.01
        )
    copies = [slab_nbytes(slots=7, length=320, **shape) / 2**20 for shape in (demo, llama)]
    assert "{:.1f} MiB of the demo's 12, and {:.0f} MiB".format(*copies) in " ".join(SLOTS.split())
    with Engine.load("demo", slots=8, max_len=1024) as engine:
        config = engine.model.config
        assert (config.layers, config.Hkv, config.Dh, engine.model.kv_dtype.size) == tuple(
            demo.values()
        )
        prompts = [
            [5 + at % 200 for at in range(320)] + [300 + request] * 9 for request in range(8)
        ]
        results = engine.generate(prompts, SamplingParams(max_tokens=2))
        taken_over = [result.metrics.cached_tokens for result in results]
        assert taken_over[0] == 0 and taken_over.count(320) >= 6, taken_over
        with pytest.raises(ValueError, match="but a slot holds 1,024"):
            engine.submit([1] * 1000, SamplingParams(max_tokens=100))


def test_ci_runs_the_printed_command():
    """Each line is complete: it sets everything up, and opens the screen or runs the tests."""
    screen, tests = re.findall(r"^(python3 -m venv .*)$", README, re.MULTILINE)
    assert screen.endswith(" && .venv/bin/python tui.py")
    assert tests.endswith(" && .venv/bin/python -m pytest")
    assert tests in CONTRIBUTING and tests in (ROOT / ".ci" / "run").read_text()


def test_models_page_names_config_fields():
    """Regression: the page named a field that had been renamed."""
    rows = re.findall(
        r"^\| `\w+` \|.*\| (.*) \|$", MODELS.split("## What is supported")[0], re.MULTILINE
    )
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert {*re.findall(r"^\| `(\w+)` \|", MODELS, re.MULTILINE)} == {
        "model_type",
        *FAMILIES,
    } and len(named) > 15
    missing = [
        name
        for name in named
        if name not in Config.__dataclass_fields__ and not hasattr(Rope, name[5:])
    ]
    assert not missing, missing


def test_imported_folders_are_packages():
    """A folder without an `__init__.py` loses to an installed package of its name further down `sys.path`."""
    assert all((ROOT / name / "__init__.py").is_file() for name in (*ROOMS, "course"))
