"""Make a self-contained HTML page from a recording.

    python tui.py --plain --script race24 --record run.json
    python docs/make/page.py run.json out.html

Two recordings of one run each are shown as a race: python docs/make/page.py static.json continuous.json out.html
A page contains its recording, so it can be regenerated from itself: python docs/make/page.py out.html out.html

The project's own page, with a new race of the demo model: python docs/make/page.py --demo docs/index.html
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import metadata
from pathlib import Path

if not __package__:  # run as a program in the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from base import installation
from base.atomic_write import write_whole
from base.validation import shown
from benchmarks import report
from engine.snapshot import percentile
from policies import POLICIES
from screen import export_recording as record
from screen.draw.style import count, span
from server import live_page
from web import simulate

ROOT = Path(__file__).resolve().parents[2]
MOST = 1_000_000  # size limit of a page in bytes, for slow connections
EMBEDDED = r'<script type="application/json" id="data-{}">(.*?)</script>'
LETTER, RATE = 240, 60.0  # in the game: tokens of a long text, prompts per second
SCHEDULER = (
    "request.py",
    "sched.py",
    "policies.py",
    "prefix.py",
    "experiments/simulator.py",
)  # sources that run in the page
SECTIONS = ("lab", "game", "talk", "story", "made")
QUESTIONS = (
    "Tell me a story about a fox and a lantern.",
    "What is 17 + 6?",
    "Count from 3 to 12.",
    "Spell the word garden.",
)
NAVIGATION = """<a href="#game">Play it</a>
  <a href="#lab">Try it</a>
  <a href="#run">Run it</a>
  <a data-file="README.md">The repository</a>"""
# The preview that messengers show for a link to the page
CARD = """<meta property="og:image" content="{address}card.png">
<meta property="og:image:width" content="1200">
<meta property="og:image:height" content="630">
<meta property="og:image:alt" content="The same prompts under static and under continuous batching: slots and time">
<meta name="twitter:card" content="summary_large_image">"""
LONGER = """The first requests may take longer under continuous batching, because more of them share a step. All
who come later gain."""
DRAFTS = """Draft tokens are tried again where they were tried, and as many of them are accepted, because what
other steps would have tried is unknown."""
ASKS = "Why can one machine answer many people at once?"
LEAD = """A language model writes in steps. Each step makes one more <i>token</i>, a word or a part of one, for
every request in a slot, and it reads the whole model once. {bargain}So no slot should be empty while requests wait.
<b>Static</b> batching admits {slots} requests, and no others until all of them are done. <b>Continuous</b>
batching gives a free slot to the next request at once: the same {many} answers, letter for letter, in
{fast_steps} steps instead of {slow_steps}, {fast} instead of {slow}."""
BARGAIN = "A step makes {slots} tokens for {times} times the price of one. "
TRUTH = """This is a real run of nanobatch, a serving engine for language models. The steps and their order are as
recorded. Each step is shown with the time that such a step takes undisturbed, because other programs used the
processor, too."""
COLUMNS = ("nanobatch continuous", "mlx-lm", "llama.cpp")


def joined(recordings: list[dict]) -> dict:
    """Join recordings into one with all their runs."""
    first = recordings[0]
    if any(recording["fields"] != first["fields"] for recording in recordings):
        raise ValueError("the recordings are of several versions; record all of them again")
    return first | {"runs": [run for recording in recordings for run in recording["runs"]]}


def addresses() -> tuple[str, str]:
    """Return the URLs of the repository and of the page that GitHub publishes from its `docs/`. Both are
    empty until pyproject.toml names the repository."""
    if installation.IS_INSTALLED:
        urls = metadata("nanobatch").get_all("Project-URL", [])
        repository = dict(each.split(", ", 1) for each in urls).get("Repository", "")
    else:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        repository = project.get("urls", {}).get("Repository", "")
    if not repository:
        return "", ""
    found = re.fullmatch(r"https://github\.com/([\w-]+)/([\w.-]+)", repository)
    if not found:
        words = f"Repository = {shown(repository)} in pyproject.toml"
        raise ValueError(f"{words}, but it must be such as https://github.com/owner/name")
    return repository, f"https://{found[1].lower()}.github.io/{found[2]}/"


def read_recording(path: str) -> dict:
    """Read a recording from its file, or from a page that contains it."""
    name = shown(path, 200)
    if not Path(path).is_file():
        raise ValueError(f"there is no file {name}; tui.py --record writes one")
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = re.search(EMBEDDED.format("recording"), text)
        recording = json.loads(found[1] if found else text)
        is_ours = recording["format"] == record.FORMAT
    except (ValueError, RecursionError, LookupError, TypeError):  # invalid JSON, or not an object
        is_ours = False
    if not is_ours:
        raise ValueError(f"{name} is not a recording of this version; tui.py --record writes one")
    return recording


def record_demo() -> dict:
    """Record a race of the demo model in a separate process. Draft tokens are off, because their timing
    depends on the clock, and the page plans each step again."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/run.json"
        command = [
            *installation.start("tui.py"),
            "--plain",
            "--speculate",
            "0",
            "--script",
            "race24",
        ]
        command += ["--record", file]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return read_recording(file)


def read_talk(path: str) -> list[dict]:
    """Read the conversation in a page; a recording has none."""
    found = re.search(EMBEDDED.format("talk"), Path(path).read_text(encoding="utf-8"))
    return json.loads(found[1]) if found else []


def talk_demo() -> list[dict]:
    """Run a conversation with the demo model. Return its turns with their token counts."""
    from nanobatch import Engine, SamplingParams

    turns = []
    messages = []
    with Engine.load("demo", slots=2, max_len=512) as engine:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            result = engine.submit(messages, SamplingParams(max_tokens=240)).result()
            messages.append({"role": "assistant", "content": result.text})
            figures = result.metrics
            counts = {"cached": figures.cached_tokens, "tokens": figures.output_tokens}
            counts["prompt"] = figures.prompt_tokens
            turns.append({"question": question, "answer": result.text, **counts})
    return turns


def make(recordings: list[dict], pyodide_at: str = "", talk: Sequence[dict] = ()) -> str:
    """Return the page. `pyodide_at`: the URL of Pyodide, if not the CDN's. `talk`: the turns of a
    conversation."""
    recording = joined(recordings)
    pyodide = json.loads((live_page.FOLDER / "pyodide.json").read_text(encoding="utf-8"))
    pyodide["at"] = pyodide_at or pyodide["at"]
    data = {"recording": recording, "lab": lab_of(recording, pyodide)}
    # Other recordings do not get the text about the project's own race, which would not fit them
    is_ours = recording["about"].get("model") == "demo" and is_race(recording, of=24)
    repository, address = addresses()
    if is_ours:
        data["game"] = game_of(recording) | {"address": address and f"{address}#game"}
    texts = {name: (live_page.FOLDER / f"{name}.html").read_text("utf-8") for name in SECTIONS}
    parts = head_of(recording) | {
        "card": CARD.format(address=address) if is_ours else "",
        "nav": NAVIGATION if is_ours else "",
        "lab": texts["lab"].replace("{drafts}", DRAFTS if has_drafts(recording) else ""),
        "game": texts["game"] if is_ours else "",
        "talk": told(texts["talk"], talk) if talk else "",
        "budget": budget_in_words(recording),
        "story": filled(texts["story" if is_ours else "made"], recording),
    }
    if talk:
        data["talk"] = list(talk)
    text = live_page.page(data, parts=parts, connects=pyodide["at"])
    if not repository:
        return text
    text = text.replace("<a data-annotated", f'<a href="{address}annotated/index.html"')
    return re.sub('<a data-file="(.*?)"', rf'<a href="{repository}/blob/main/\1"', text)


def checked(recordings: list[dict], talk: Sequence[dict]) -> str:
    """Make the page from untrusted recordings. Raise ValueError if they are malformed."""
    addresses()  # outside the `try`: an error here is not the recording's fault
    try:
        return make(recordings, talk=talk)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        what = f"{type(error).__name__}: {shown(str(error), 80)}"
        words = "the recording does not have the form that tui.py --record writes"
        raise ValueError(f"{words} ({what}); record it again") from None


def is_race(recording: dict, of: int | None = None) -> bool:
    """Return True for two runs of the same prompts, static and continuous, with the same answers."""
    first, *others = recording["runs"]
    policies = [run["policy"] for run in recording["runs"]]
    is_alike = len(others) == 1 and others[0]["hashes"] == first["hashes"]
    return policies == ["static", "continuous"] and is_alike and of in (None, len(first["hashes"]))


def has_drafts(recording: dict) -> bool:
    """Return True if a step has draft tokens. The earliest recordings lack the field."""
    names = recording["fields"]["StepView"]
    steps = (simulate.named(names, step) for run in recording["runs"] for step in run["steps"])
    return any(step.get("drafts") for step in steps)


def lab_of(recording: dict, pyodide: dict) -> dict:
    """Return the data for the scheduler in the page."""
    python = live_page.FOLDER / "python"  # in a wheel (setup.py): copies with short module names
    folder = python if python.is_dir() else ROOT
    paths = {name: folder / name for name in SCHEDULER}
    paths["simulate.py"] = folder / "web" / "simulate.py"
    paths["worker.js"] = live_page.FOLDER / "worker.js"
    return {
        "pyodide": pyodide,
        "sources": {name: path.read_text(encoding="utf-8") for name, path in paths.items()},
        "price": price_of(recording),
    }


def price_of(recording: dict) -> dict[str, float]:
    """Return the recorded step costs, with the cost of a chunk converted to a cost per token."""
    at = recording["fields"]["StepView"].index("prefill")
    chunks = [chunk for run in recording["runs"] for step in run["steps"] for chunk in step[at]]
    tokens = sum(stop - start for *_, start, stop in chunks)
    price = recording["prices"]
    token = price["chunk"] * len(chunks) / max(tokens, 1)
    return {"step": price["step"], "row": price["row"], "token": token}


def game_of(recording: dict) -> dict:
    """Return the game's prompts, and the result of each policy with them.

    They are the recorded prompts with the lengths of their answers. They arrive one after another, from
    three clients, and some begin with a long text.
    """
    run = recording["runs"][0]
    names = recording["fields"]["RequestView"]
    at = names.index("prompt")
    hand = []
    for number, sent in enumerate(simulate.sent_of(run, recording["fields"])):
        long = LETTER if number % 6 == 4 else 0
        # No two prompts share a prefix
        prompt = tuple([number + 1] * (len(sent.prompt) + long))
        client = "first" if number % 2 else ("second", "third")[number // 2 % 2]
        # Without draft tokens, like the player's slots
        hand.append(sent._replace(prompt=prompt, client=client, drafts=()))
    hand = simulate.arrivals(hand, RATE)
    price = price_of(recording)
    limits = simulate.named(recording["fields"]["Limits"], run["limits"])
    limits |= {"slots": 8, "max_len": 2000, "chunk": 64, "budget": 104}
    runs = []
    for name, policy in POLICIES.items():
        played = simulate.play(limits, policy, hand, price)
        runs.append({"policy": name, "does": policy.does, **figures_of(played, hand)})
    requests = []
    for number, (sent, packed) in enumerate(zip(hand, run["requests"], strict=True), start=1):
        prompt = packed[at] if len(sent.prompt) < LETTER else f"(a long text) {packed[at]}"
        sizes = {"prompt_tokens": len(sent.prompt), "output_tokens": sent.tokens}
        requests.append({"id": number, "prompt": prompt, **sizes, "arrived": sent.arrived})
    return {"requests": requests, "price": price, "slots": limits["slots"], "runs": runs}


def figures_of(played: dict, hand: list[simulate.Sent]) -> dict[str, float]:
    """Return the makespan, the 95th percentile of TTFT, and the useful fraction of slots × time."""
    firsts: dict[int, float] = {}
    used = 0.0
    for step, (began, ended) in zip(played["steps"], played["clock"], strict=True):
        for _, number, _, stop in step["prefill"]:
            if stop == len(hand[number - 1].prompt):
                firsts[number] = ended - hand[number - 1].arrived
        rows = len(step["prefill"]) + len(step["decode"]) - len(step["ghosts"])
        used += rows * (ended - began)
    done = played["clock"][-1][1]
    return {"done": done, "first": percentile(firsts.values(), 0.95), "useful": used / (8 * done)}


# --- the text of the page --------------------------------------------------------------------------


def head_of(recording: dict) -> dict[str, str]:
    """Return the title and the introduction."""
    runs = recording["runs"]
    many = len(runs[0]["requests"])
    policies = [html.escape(run["policy"]) for run in runs]
    order = f"; {' above, '.join(policies)} below" if len(runs) > 1 else ""
    if not is_race(recording):
        lead = "Recorded step by step while it ran: each rectangle is a decision of the scheduler."
        title = f"{count(many, 'prompt')}, as they were answered"
        return {"title": title, "lead": lead, "truth": "", "order": f"{order}."}
    slots = int(runs[0]["limits"][recording["fields"]["Limits"].index("slots")])
    slow, fast = (span(run["clock"][-1][1]).replace(" ", "&nbsp;") for run in runs)
    named = {8: "eight"}.get(slots, slots)
    times = times_of(recording["prices"], slots)
    slow_steps, fast_steps = (f"{len(run['steps']):,}" for run in runs)
    facts = {
        "slots": named,
        "many": many,
        "slow": slow,
        "fast": fast,
        "slow_steps": slow_steps,
        "fast_steps": fast_steps,
        "bargain": BARGAIN.format(slots=named, times=times) if times else "",
    }
    return {
        "title": ASKS,
        "lead": LEAD.format(**facts),
        "truth": TRUTH,
        "order": f"{order}. {LONGER}",
    }


def budget_in_words(recording: dict) -> str:
    """Describe the budget of a step, why it has this size, and how much of it most steps use."""
    fields = recording["fields"]
    run = recording["runs"][-1]
    limits = simulate.named(fields["Limits"], run["limits"])
    slots, chunk, budget = (int(limits[name]) for name in ("slots", "chunk", "budget"))
    prompts = fields["StepView"].index("prefill")
    quiet = sum(not step[prompts] for step in run["steps"])
    words = f"Here it is {count(budget, 'token')}"
    if budget == slots + 2 * chunk:
        words += f": {slots} for the answers, one for each slot, and {budget - slots} for prompts"
        words += f" (two chunks of {chunk})"
    return (
        f"{words}. In {quiet} of {count(len(run['steps']), 'step')} no prompt is left to read, and "
        f"a step spends one token for each answer, {slots} at most."
    )


def times_of(prices: dict[str, float], rows: int) -> str:
    """Return the cost of a step with this number of rows, as a multiple of a step with one row."""
    one = prices["step"] + prices["row"]
    return f"{(prices['step'] + prices['row'] * rows) / one:.1f}" if one else ""


def filled(story: str, recording: dict) -> str:
    """Fill in the figures of the text next to a recording. Every figure comes from a file."""
    price = recording["prices"]
    one, eight = (price["step"] + price["row"] * rows for rows in (1, 8))
    about = recording["about"]
    form = re.search(r"rows \((\w+)", about.get("engine", ""))
    facts = {
        "one": span(one),
        "eight": span(eight),
        "times": times_of(price, 8) or "–",
        "command": about.get("command", ""),
        "version": about.get("version", ""),
        "processor": about.get("processor", ""),
        "form": form[1] if form else "none of ours",
        "steps": f"{sum(len(run['steps']) for run in recording['runs']):,}",
        "answers": f"{sum(len(run['requests']) for run in recording['runs']):,}",
    }
    facts = {name: html.escape(text) for name, text in facts.items()}
    facts["table"] = table_of("bench-15m.json")
    return re.sub(r"\{(\w+)\}", lambda found: facts[found[1]], story)


def told(section: str, turns: Sequence[dict]) -> str:
    """Return the HTML of a conversation: each turn with a bar of its tokens, all on the same scale."""
    most = max(turn["prompt"] + turn["tokens"] for turn in turns)
    lines = []
    for turn in turns:
        question, answer = (html.escape(turn[name]) for name in ("question", "answer"))
        read = turn["prompt"] - turn["cached"]
        said = f"read {count(read, 'token')}"
        if turn["cached"]:
            said = (
                f"read {read} of {turn['prompt']} tokens; {turn['cached']} were still in its slot"
            )
        said += f"; {count(turn['tokens'], 'token')} of answer"
        bars = []
        at = 0.0
        for name, tokens in (("held", turn["cached"]), ("read", read), ("said", turn["tokens"])):
            width = 1000 * tokens / most
            bars.append(f'<rect class="{name}" x="{at:.1f}" width="{width:.1f}" height="14"/>')
            at += width
        bar = f'<svg class="tokens" viewBox="0 0 1000 14" role="img" aria-label="{said}">{"".join(bars)}</svg>'
        texts = (
            f'<p class="asked"><bdi>{question}</bdi></p><div class="reply"><p>{answer}</p></div>'
        )
        lines.append(f'<div class="turn">{texts}{bar}<p class="facts">{said}</p></div>')
    last = turns[-1]
    facts = {"turns": len(turns), "before": last["cached"], "read": last["prompt"] - last["cached"]}
    facts |= {"talk": "\n  ".join(lines)}
    return re.sub(r"\{(\w+)\}", lambda found: str(facts[found[1]]), section)


def table_of(file: str) -> str:
    """Return an HTML table of the speed of three engines in two parts of a benchmark."""
    records = json.loads((ROOT / "docs" / file).read_text())["records"]
    medians: dict[tuple[str, str], dict[str, float]] = {}
    for (part, x, figure, contestant), summary in report.summarise(records).items():
        if figure in ("decode tokens/s", "total tokens/s"):
            medians.setdefault((part, x), {})[contestant] = summary.median
    heads = "".join(f"<th>{name.split()[0]}</th>" for name in COLUMNS)
    words = {"decode": "all answers are being written", "closed": "users come and go"}
    lines = []
    told = ""
    for (part, x), found in medians.items():
        cells = "".join(f"<td>{report.number(found[name])}</td>" for name in COLUMNS)
        if part != told:
            lines.append(f'<tr><th colspan="4">{words[part]}</th></tr>')
        told = part
        unit, number = x.split()
        noun = {"rows": "request", "users": "user"}[unit]
        lines.append(f"<tr><td>{count(int(number), noun)}</td>{cells}</tr>")
    return f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def main(arguments: list[str] | None = None) -> int:
    prog = installation.command("docs/make/page.py").removeprefix("python ")
    parser = argparse.ArgumentParser(
        prog, description="Make a page of a recording.", allow_abbrev=False
    )
    parser.add_argument("recordings", nargs="*", metavar="run.json")
    parser.add_argument("out", metavar="out.html")
    parser.add_argument("--demo", action="store_true", help="record a race of the demo model first")
    args = parser.parse_args(arguments)
    try:
        recordings = (
            [record_demo()] if args.demo else [read_recording(path) for path in args.recordings]
        )
        talk = talk_demo() if args.demo else read_talk(args.recordings[0]) if recordings else []
        if not recordings:
            raise ValueError("name a recording, and then the page; tui.py --record writes one")
        text = checked(recordings, talk) if args.recordings else make(recordings, talk=talk)
        text = text.encode(errors="replace").decode()
        size = len(text.encode())
        if size > MOST:
            words = f"the page has {size:,} bytes, and may have {MOST:,}"
            raise ValueError(f"{words}; record a shorter run")
    except (OSError, ValueError) as error:
        print(f"docs/make/page.py: {error}", file=sys.stderr)
        return 2
    try:
        write_whole(args.out, text)
    except OSError as error:
        print(f"docs/make/page.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{args.out}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
