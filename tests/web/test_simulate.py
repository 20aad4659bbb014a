"""The scheduler lab of the page, tested without a browser: edited lines, and errors with line numbers.

`test_the_lab_runs_in_pyodide` needs Pyodide's npm package, at the version of `web/pyodide.json`:

    npm pack pyodide@314.0.7 && tar xzf pyodide-*.tgz
    NANOBATCH_PYODIDE=package python -m pytest tests/web
"""

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from browsers import in_node, needs_node, needs_pyodide

from docs.make import page
from policies import POLICIES
from web import simulate

ROOT = Path(__file__).parents[2]
PYODIDE = json.loads((ROOT / "web" / "pyodide.json").read_text())
LIMITS = {"slots": 4, "max_len": 200, "chunk": 16, "budget": 32}
PRICE = {"step": 0.002, "row": 0.0003, "token": 0.0001}
FIELDS = {
    "RequestView": ["metrics"],
    "Metrics": ["prompt_tokens", "output_tokens"],
    "StepView": ["decode", "ghosts", "drafts"],
}
RUN = {
    "requests": [[[20, 5 + 7 * (number % 4)]] for number in range(12)],
    "ids": [[number] * 20 for number in range(12)],
    "asked": [40] * 12,
    "arrivals": [0.0] * 12,
    "steps": [],
}


def asked(lines: str = "", policy: str = "continuous", rate: float = 0, run: dict = RUN) -> dict:
    question = {"run": run, "fields": FIELDS, "rate": rate, "limits": LIMITS, "price": PRICE}
    question |= {"lines": lines or simulate.lines(), "policy": policy}
    return json.loads(simulate.answer(json.dumps(question)))


def test_the_page_offers_every_policy():
    """A reader's policy exists only in the page's lines, not in the project."""
    assert json.loads(simulate.start())["policies"] == [*POLICIES, "mine"]
    assert "mine" not in POLICIES


@pytest.mark.parametrize("policy", [*POLICIES, "mine"])
def test_the_lines_as_they_are_change_no_plan(policy):
    """With unchanged lines, each policy makes the same plans as the one in `policies.py`."""
    played = asked(policy=policy)
    assert "error" not in played and len(played["steps"]) > 20
    if policy in POLICIES:
        prompts = simulate.sent_of(RUN, FIELDS)
        plain = simulate.play(LIMITS, POLICIES[policy], prompts, PRICE)
        assert json.loads(json.dumps(plain["steps"])) == played["steps"]


def test_drafts_in_the_pages_replay():
    """Request 3 decodes in three steps. In the second, five of seven draft tokens are accepted."""
    steps = [[[[0, 3]], [], []], [[[0, 3]], [], [[0, 7, 5]]], [[[0, 3]], [], []]]
    played = asked(run=RUN | {"steps": steps})
    plain = asked()
    assert [step["drafts"] for step in played["steps"] if step["drafts"]] == [[[2, 7, 5]]]
    tokens = [sum(step["tokens"] for step in run["steps"]) for run in (plain, played)]
    assert tokens[0] == tokens[1]


def test_a_changed_line_changes_the_plans():
    one = simulate.lines().replace("running: free,", "running: min(free, 1),", 1)
    assert one != simulate.lines()
    assert [len(step["admitted"]) for step in asked()["steps"][:2]] == [4, 0]
    assert [len(step["admitted"]) for step in asked(one)["steps"][:3]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("free if free >= 2", "fre if free >= 2", "NameError: name 'fre' is not defined"),
        ("TABLE = (", "TABLE = = (", "SyntaxError"),
        ("return iter(scheduler.waiting.values())", "return [][1]", "IndexError"),
    ],
)
def test_an_error_names_its_line(before, after, said):
    lines = simulate.lines().replace(before, after, 1)
    at = next(i for i, line in enumerate(lines.split("\n"), start=1) if after in line)
    played = asked(lines, policy="mine")
    assert played["line"] == at and played["error"].startswith(said)
    assert "<lines>" not in played["error"]


def test_a_policy_that_admits_nobody_is_said_to_do_so():
    lines = simulate.lines().replace("running: free,", "running: 0,", 1)
    assert asked(lines)["error"] == "no slots are taken, 12 wait, and no step is planned"


def test_a_load_spreads_the_arrivals_the_same_each_time():
    played = asked(rate=20.0)
    assert played["arrivals"] == asked(rate=20.0)["arrivals"] == sorted(played["arrivals"])
    assert 0.2 < played["arrivals"][-1] < 3
    for step, (began, ended) in zip(played["steps"], played["clock"], strict=True):
        assert (
            ended
            > began
            >= max((played["arrivals"][r - 1] for _, r in step["admitted"]), default=0)
        )


def test_pyodide_is_pinned_by_hash():
    assert PYODIDE["at"].startswith("https://") and PYODIDE["at"].count("@") == 1
    assert set(PYODIDE["files"]) >= {"pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm"}
    for integrity in PYODIDE["files"].values():
        kind, _, digest = integrity.partition("-")
        assert kind == "sha384" and len(base64.b64decode(digest)) == 48


# --- in the page's worker -------------------------------------------------------------------------

# Run `web/worker.js` with these files in place of Pyodide's, and return what the worker says.
WORKER = """
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
const folder = mkdtempSync(join(tmpdir(), "worker-"));
let made = 0;
const module = (content) => {
  const file = join(folder, `${(made += 1)}.mjs`);
  writeFileSync(file, content);
  return pathToFileURL(file).href;
};
// What a worker of a browser has, and Node lacks or has otherwise
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = Object;
globalThis.location = new URL("https://files.invalid/");
const node = globalThis.process;
delete globalThis.process;
globalThis.Blob = class { constructor([content]) { this.content = content; } };
URL.createObjectURL = (blob) => module(blob.content instanceof ArrayBuffer ? Buffer.from(blob.content) : blob.content);
const said = () => new Promise((done) => (self.postMessage = done));
const { sources } = asked;
await import(module(sources["worker.js"]));
const files = Object.fromEntries(Object.entries(asked.files).map(([name, text]) => {
  const bytes = asked.package ? readFileSync(join(asked.package, name)) : Buffer.from(text);
  return [name, bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength)];
}));
const answers = [];
for (const data of [{ files, sources, lock: { info: asked.info, packages: {} } }, ...asked.questions]) {
  const answer = said();
  self.onmessage({ data });
  answers.push(await answer);
}
node.stdout.write(JSON.stringify(answers), () => node.exit()); // Pyodide keeps Node alive
"""
# A Pyodide with a file system but no Python: it returns the files that were written
DISK = """
const folders = new Set(["."]), written = {};
const folder = (path) => path.includes("/") ? path.slice(0, path.lastIndexOf("/")) : ".";
export const loadPyodide = async () => ({
  FS: {
    mkdirTree: (path) => path.split("/").forEach((_, i, all) => folders.add(all.slice(0, i + 1).join("/"))),
    writeFile: (path, text) => {
      if (!folders.has(folder(path))) throw new Error(`there is no folder for ${path}`);
      written[path] = text;
    },
  },
  pyimport: () => ({ start: () => JSON.stringify(written) }),
});
"""


def worker(questions: list[dict], **files) -> list[dict]:
    """Return the worker's responses to its start and to each question."""
    sources = page.lab_of(page.read_recording(str(ROOT / "docs" / "index.html")), {})["sources"]
    said = {"sources": sources, "questions": [{"question": json.dumps(q)} for q in questions]}
    return in_node(WORKER, said | files)


@needs_node
def test_the_worker_writes_every_source():
    """Regression: the worker created a single folder, under a fixed name. When the file in it moved, no
    visitor could open the lab."""
    fake = {"pyodide.mjs": DISK, "pyodide.asm.mjs": "export default null"}
    (answer,) = worker([], files=fake)
    assert "failed" not in answer, answer
    sources = page.lab_of(page.read_recording(str(ROOT / "docs" / "index.html")), {})["sources"]
    assert json.loads(answer["answer"]) == sources
    assert any("/" in path for path in sources)


@needs_node
@needs_pyodide
def test_the_lab_runs_in_pyodide():
    """The real scheduler plans the recorded race again under each policy."""
    folder = Path(os.environ["NANOBATCH_PYODIDE"]).absolute()
    for name, integrity in PYODIDE["files"].items():
        digest = hashlib.sha384((folder / name).read_bytes()).digest()
        assert integrity == f"sha384-{base64.b64encode(digest).decode()}", name
    recording = page.read_recording(str(ROOT / "docs" / "index.html"))
    static, continuous = recording["runs"]
    limits = simulate.named(recording["fields"]["Limits"], static["limits"])
    lines = simulate.lines()
    question = {"run": static, "fields": recording["fields"], "price": page.price_of(recording)}
    question |= {"limits": limits, "rate": 0, "lines": lines}
    policies = {name: question | {"policy": name} for name in (*POLICIES, "mine")}
    wrong = question | {"policy": "mine", "lines": lines.replace("free >= 2", "fre >= 2")}
    begun, *answers = worker(
        [*policies.values(), wrong],
        package=str(folder),
        files=PYODIDE["files"],
        info=PYODIDE["info"],
    )
    assert "failed" not in begun, begun
    assert json.loads(begun["answer"])["policies"] == [*policies]
    *played, error = (json.loads(answer["answer"]) for answer in answers)
    steps = {name: len(run["steps"]) for name, run in zip(policies, played, strict=True)}
    assert steps["static"] == len(static["steps"])
    assert steps["continuous"] == len(continuous["steps"])
    assert error["error"].startswith("NameError") and error["line"]
