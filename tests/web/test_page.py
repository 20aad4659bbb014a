"""The page is one HTML file that runs only its own script, whatever a recording contains."""

import json
import random
import re
import unicodedata
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browsers import in_node, needs_node
from recordings import HOSTILE, recording
from screen_stage import Stage

from docs.make import page as page_program
from docs.make.page import DRAFTS
from experiments import race
from screen import export_recording as record
from screen.draw.style import clean
from server import live_page

ROOT = Path(__file__).parents[2]
UNSEEN = ("Cc", "Cf", "Zl", "Zp")  # control and format characters, and line separators


class Elements(HTMLParser):
    """The elements of a page, as a browser would parse them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[str, str] = {}  # texts of elements with an id
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id", "")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside] = self.texts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def test_a_hostile_text_ends_no_element_and_adds_none():
    hostile = recording([(prompt, 40) for prompt in HOSTILE], burst=4)
    calm = recording([("words", 40)], burst=4)
    found = Elements(page_program.make([hostile]))
    assert [tag for tag, _ in found.tags] == [
        tag for tag, _ in Elements(page_program.make([calm])).tags
    ]
    # The page's script receives exactly the same texts
    assert json.loads(found.texts["data-recording"]) == hostile
    assert any("</script>" in json.dumps(run) for run in hostile["runs"])


def test_the_content_security_policy():
    text = page_program.make([recording()])
    found = Elements(text)
    rules = next(a["content"] for t, a in found.tags if a.get("http-equiv"))
    rules = dict(rule.split(" ", 1) for rule in rules.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    assert len(scripts) == 1 and live_page.hash_of(scripts[0]) in rules["script-src"]
    assert "unsafe-inline" not in text and "'unsafe-eval'" not in text
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert len(styles) == 1 and rules["style-src"] == live_page.hash_of(styles[0])
    loads = [a for t, a in found.tags if t in ("link", "img", "iframe", "object") or "src" in a]
    assert [a["rel"] for a in loads] == ["icon"] and loads[0]["href"].startswith("data:")
    assert not any("style" in a or "onclick" in a for _, a in found.tags)


def test_a_replay_with_drafts_is_marked():
    """Regression: the page did not say that the lab replays the recorded drafts under any setting. In the
    game the policies had drafts, but the player had none."""
    run = recording(burst=24)
    names = run["fields"]["StepView"]
    alike = page_program.game_of(run)["runs"]
    told = [DRAFTS in body_of(page_program.make([run]))]
    step = next(step for step in run["runs"][0]["steps"] if step[names.index("decode")])
    ((slot, _), *_) = step[names.index("decode")]
    step[names.index("drafts")] = [[slot, 3, 2]]
    told.append(DRAFTS in body_of(page_program.make([run])))
    assert told == [False, True]
    assert page_program.game_of(run)["runs"] == alike


def body_of(text: str) -> str:
    return text.partition("<body>")[2].partition('<script type="application/json"')[0]


def test_no_module_writes_markup():
    """Texts enter the page as `textContent`. No module contains anything that could parse them as markup."""
    texts = {path.name: path.read_text() for path in live_page.FOLDER.glob("*.js")}
    assert len(texts) >= 7
    words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    assert not [name for name, text in texts.items() if re.search(words, text)]


def test_a_name_is_there_once_in_all_modules():
    """Scripts are concatenated, so a second definition would be a syntax error."""
    names = []
    for module in live_page.MODULES:
        text = (live_page.FOLDER / f"{module}.js").read_text()
        names += re.findall(
            r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.M
        )
    assert len(names) > 40 and len(names) == len(set(names))
    assert {path.stem for path in live_page.FOLDER.glob("*.js")} >= set(live_page.MODULES)


OURS = page_program.read_recording(str(ROOT / "docs" / "index.html"))
REPOSITORY, ADDRESS = "https://github.com/Ann/nanobatch", "https://ann.github.io/nanobatch/"


def test_the_links_of_the_page_follow_from_one_setting(tmp_path, monkeypatch):
    """Regression: on GitHub Pages, which serves only docs/, the links led nowhere."""
    named = set()
    for setting, links in (("", []), (f'Repository = "{REPOSITORY}"', [REPOSITORY, ADDRESS])):
        (tmp_path / "pyproject.toml").write_text(f"[project]\n[project.urls]\n{setting}\n")
        with monkeypatch.context() as patch:
            patch.setattr(page_program, "ROOT", tmp_path)
            repository, address = page_program.addresses()
        assert [repository, address] == (links or ["", ""])
        with monkeypatch.context() as patch:
            patch.setattr(page_program, "addresses", lambda to=(repository, address): to)
            found = Elements(page_program.make([OURS]))
        anchors = [
            a for tag, a in found.tags if tag == "a" and not a.get("href", "").startswith("#")
        ]
        named |= {a["data-file"] for a in anchors if "data-file" in a}
        # Without an address file names are plain text, which the script turns into links where it can
        assert [a for a in anchors if "href" in a] == (anchors if setting else [])
        hrefs = {a["href"].removeprefix(f"{REPOSITORY}/blob/main/") for a in anchors if setting}
        made = {f"{ADDRESS}annotated/index.html"}  # created when the page is published
        assert hrefs == (named | made if setting else set())
        metas = {a.get("property"): a["content"] for tag, a in found.tags if "content" in a}
        assert metas["og:image"] == f"{address}card.png"
        game = json.loads(found.texts["data-game"])
        assert game["address"] == (f"{ADDRESS}#game" if setting else "")
    assert {"README.md", "sched.py", "docs/speed.md"} <= named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_a_wrong_repository_address_is_refused(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(recording()))
    urls = '[project]\n[project.urls]\nRepository = "https://github.com/Ann"\n'
    (tmp_path / "pyproject.toml").write_text(urls)
    monkeypatch.setattr(page_program, "ROOT", tmp_path)
    for name in page_program.SCHEDULER:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert page_program.main([str(run), str(tmp_path / "out.html")]) == 2
    said = capsys.readouterr().err
    assert "must be such as https://github.com/owner/name" in said and said.count("\n") == 1


ODD = (None, True, -1, 0, 10**400, 1e308, float("nan"), "", "x" * 3000, "\ud800", [], {}, [[1, 2]])


def changed(dice: random.Random, recording: dict) -> str:
    """Return the recording with something removed, duplicated or changed, or its text truncated or damaged."""
    tree = json.loads(json.dumps(recording))
    node, parent, key = tree, tree, ""
    while isinstance(node, (dict, list)) and node and (node is tree or dice.random() < 0.85):
        parent = node
        key = dice.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = parent[key]
    if dice.random() < 0.3:
        del parent[key]
    elif dice.random() < 0.3 and isinstance(parent, list):
        parent.insert(key, node)
    else:
        parent[key] = dice.choice(ODD)
    text = json.dumps(tree)
    at = dice.randrange(len(text))
    damaged = (text, text, text[:at], text[:at] + dice.choice('0"[{}],') + text[at + 1 :])
    return dice.choice(damaged)


def test_a_changed_recording_makes_a_page_or_one_line(tmp_path, capsys):
    """Regression: one damaged recording in three led to a traceback."""
    whole = recording(burst=2)
    run, out = tmp_path / "run.json", tmp_path / "out.html"
    ends: Counter[int] = Counter()
    for seed in range(40):
        run.write_text(changed(random.Random(seed), whole))
        ends[page_program.main([str(run), str(out)])] += 1
        assert capsys.readouterr().err.count("\n") == (not out.exists()), seed
        out.unlink(missing_ok=True)
    assert set(ends) == {0, 2} and min(ends.values()) > 2, ends


def test_what_is_no_recording_is_refused_in_one_line(tmp_path, capsys):
    run, out = tmp_path / "run.json", str(tmp_path / "out.html")
    deep = b"[" * 200_000
    for data in (b"", b"\xff\xfe", b"{", b"[]", b"3", deep, b'{"format": 0}'):
        run.write_bytes(data)
        assert page_program.main([str(run), out]) == 2, data[:20]
        said = capsys.readouterr().err
        assert "run.json' is no" in said and said.count("\n") == 1
    for path in (tmp_path, tmp_path / "nothing.json", Path("/dev/zero")):
        assert page_program.main([str(path), out]) == 2
        said = capsys.readouterr().err
        assert "there is no file" in said and said.count("\n") == 1


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    """Regression: an invalid path led to a traceback."""
    run = tmp_path / "run.json"
    run.write_text(json.dumps(recording()))
    assert page_program.main([str(run), str(tmp_path / "nowhere" / "out.html")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("docs/make/page.py: ") and "nowhere" in said and said.count("\n") == 1


def test_a_page_can_be_made_from_itself(tmp_path, capsys):
    """Characters that UTF-8 cannot encode are kept, too."""
    one, two = (tmp_path / name for name in ("one.json", "two.json"))
    run = recording()
    run["about"]["command"] = "python tui.py --script \udcff"
    one.write_text(record.as_text(run))
    two.write_text(record.as_text(recording([("words", 40)], burst=4)))
    out = str(tmp_path / "out.html")
    assert page_program.main([str(one), str(two), out]) == 0
    first = Path(out).read_text()
    assert page_program.main([out, out]) == 0 and Path(out).read_text() == first
    assert len(page_program.read_recording(out)["runs"]) == 2
    older = json.loads(two.read_text())
    older["fields"]["RequestView"].pop()
    two.write_text(record.as_text(older))
    assert page_program.main([str(one), str(two), out]) == 2
    assert "of several versions" in capsys.readouterr().err


def test_the_words_of_a_recording_are_no_markup():
    """The recording's header (command, version, policy) is escaped, too."""
    run = recording()
    run["about"] = dict.fromkeys(("command", "version", "processor", "model"), "<b>x</b>")
    for each in run["runs"]:
        each["policy"] = "<b>x</b>"
    text = page_program.make([run, run])
    assert "<b>x</b>" not in text and text.count("&lt;b&gt;x") >= 4


PLAYS = """
import { lanesOf } from "./recording.js";
import { planInWords } from "./words.js";
const out = lanesOf(asked).map((lane) => ({
  figures: lane.figuresAt(lane.end),
  half: lane.figuresAt(lane.end / 2),
  texts: [...lane.requests.values()].map((r) => lane.textAt(r, lane.end)),
  early: [...lane.requests.values()].map((r) => lane.textAt(r, r.first - 1e-9)),
  first: lane.firstToken(1),
  words: lane.steps.map((step, i) => planInWords(lane, i).length),
}));
tell(out);
"""


@needs_node
def test_the_player_says_of_a_run_what_the_screen_says():
    """A run's metrics are those of `experiments/policy_runs.py`, and at its end each answer is complete."""
    stage = Stage().load()
    stage.session.obey("/race 12")
    stage.finish()
    run = record.record(stage.state, {}, lambda request: ())
    lanes = in_node(PLAYS, json.loads(record.as_text(run)))
    texts = [r.text for r in stage.state.requests.values()][:12]
    for lane, measured in zip(lanes, race.shown_in(stage.state).last.runs, strict=True):
        steps, useful = (measured.figures[name] for name in ("steps", "slots used"))
        assert f"{lane['figures']['steps']:,}" == steps
        assert f"{100 * lane['figures']['useful']:.0f} %" == useful
        assert lane["figures"]["answered"] == 12 and 0 < lane["half"]["answered"] < 12
        assert lane["texts"] == texts and not any(lane["early"])
        assert lane["first"] == pytest.approx(max(measured.ttfts), abs=2e-6)
        assert min(lane["words"]) >= 1


CHECKPOINTS = """
import { Lane } from "./recording.js";
import { factsInWords, planInWords } from "./words.js";
const lane = new Lane("continuous", asked.limits);
asked.steps.forEach((step, i) => lane.add(step, i, i + 1));
const words = lane.steps.map((step, i) => planInWords(lane, i).join(" "));
tell({ marks: lane.checkpoints, words, facts: factsInWords(asked.request) });
"""


@needs_node
def test_checkpoints_and_tokens_read_again_are_told():
    step = dict.fromkeys(("admitted", "why", "prefill", "decode", "held", "ghosts", "blocked"), ())
    step |= {"budget": 200, "waiting": 0}
    leaves = step | {"prefill": [(1, 7, 0, 100)], "checkpoints": [(1, 7, 100)]}
    request = {"prompt_tokens": 120, "cached_tokens": 77, "output_tokens": 1, "reread_tokens": 23}
    limits = {"slots": 2, "budget": 200, "chunk": 100}
    told = in_node(CHECKPOINTS, {"limits": limits, "steps": [step, leaves], "request": request})
    assert told["marks"] == [{"slot": 1, "request": 7, "at": 2}]
    assert "r7 after 100 tokens" in told["words"][1] and "heckpoint" not in told["words"][0]
    assert "read again: 23 tokens" in told["facts"]


LINES = """
import { endOf, inOneLine, shorten } from "./words.js";
const { signs, families } = asked;
const cuts = [];
for (let most = 1; most < families.length; most++) cuts.push(shorten(families, most), endOf(families, most));
const halves = cuts.filter((cut) => /[\\ud800-\\udfff]/u.test(cut));
tell({ lines: signs.map(inOneLine), cuts: cuts.length, halves });
"""


@needs_node
def test_the_page_agrees_with_the_terminal():
    """Invisible and bidirectional characters are shown, but not with the terminal's ␊ and ␛, which most
    browser fonts draw as a box."""
    hidden = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in UNSEEN]
    signs = [sign for sign in hidden if unicodedata.bidirectional(sign) != "AN"]
    signs = [f"a{sign}b" for sign in signs if sign not in "\u200c\u200d"]  # these occur in emoji
    assert len(signs) > 200
    drawn = in_node(LINES, {"signs": signs, "families": "👩‍👩‍👧‍👦🇨🇭" * 9})
    code = lambda found: f"<U+{ord(found[0]) - 0x2400:04X}>"  # noqa: E731
    shown = [re.sub("[␀-␟]", code, clean(sign)).replace("␡", "<U+007F>") for sign in signs]
    assert drawn["lines"] == [line.replace("\n", "¶") for line in shown]
    assert max(map(ord, "".join(drawn["lines"]))) < 256, "not every font has it"
    assert drawn["cuts"] > 200 and not drawn["halves"], "an emoji was cut in half"
