"""What each key does, the footer, and the help: keys, words, policies.

The problem. Footer, help, command palette and keyboard must not disagree.

What this file keeps. All four are made from one table, `KEYS`. `WORDS` explains the words on the
screen; what a policy does, it takes from `policies.POLICIES`.

Where next: `session.py`, which obeys.
"""

from __future__ import annotations

from typing import NamedTuple

from rich.cells import cell_len

from policies import POLICIES
from screen.ink import wrap
from screen.pages.breakage import BREAKS
from screen.paper import Paper
from screen.room import RIVALS
from screen.state import State

# Every command, with what may stand behind it
COMMANDS = {
    "burst": "8",
    "json": "Tell me about a fox.",
    "race": "12 static serial",
    "compare": "fair",
    "why": "p95",
    "bill": "again",
    "same": "200",
    "break": "nan",
    "policy": "static",
    "load": "2",
    "cancel": "7",
    "pause": "",
    "resume": "",
    "step": "10",
    "slow": "8",
    "budget": "64",
    "elephant": "40 104",
    "set": "temperature=0.8 max=64",
    "help": "",
    "quit": "",
}
ARGUMENTS = {
    "policy": POLICIES,
    "compare": POLICIES,
    "race": (*POLICIES, "last"),
    "cancel": ("all",),
    "slow": ("off",),
    "load": ("off",),
    "budget": ("off",),
    "why": ("p50", "p95", "p99"),
    "bill": ("again",),
    "same": ("last",),
    "break": BREAKS,
    "set": ("temperature=", "max=", "seed=", "burst=", "rate=", "client="),
}


class Key(NamedTuple):
    keys: str  # as Textual names them
    show: str
    action: str
    label: str
    help: str  # of a pair of keys, the first explains both
    # The keys of the lowest ranks are shown first, while there is room; 0: never in the footer
    footer: int = 0


KEYS = (
    Key("i", "i", "prompt", "Prompt", "type a prompt: Enter fires it, Esc leaves the box", 3),
    Key(
        "slash",
        "/",
        "prompt('/')",
        "Command",
        "type a command; tab completes, and the end of this page names them all",
    ),
    Key("enter", "enter", "fire", "Fire", "fire the prompt that is in the box, or type one", 10),
    Key(
        "b",
        "b",
        "command('/burst')",
        "Burst",
        "fire a burst: prompts of different lengths, all at once",
        1,
    ),
    Key(
        "j",
        "j",
        "command('/json')",
        "JSON",
        "ask for JSON of a schema; paused, s shows token by token what is forbidden (✗)",
    ),
    Key("space", "space", "pause", "Pause", "stop the engine between two steps; again: go on", 7),
    Key("s", "s", "command('/step')", "Step", "run one step, then pause", 9),
    Key(
        "minus",
        "-",
        "command('/slow -')",
        "Slower",
        "slow motion: half as many steps a second (/slow 8: eight)",
        9,
    ),
    Key(
        "plus,equals_sign",
        "+",
        "command('/slow +')",
        "Faster",
        "twice as many, and at last full speed",
        16,
    ),
    Key("0", "0", "command('/slow off')", "Full speed", "leave slow motion"),
    Key(
        "p", "p", "command('/policy')", "Policy", "the next policy: drain the slots, then switch", 6
    ),
    Key(
        "c",
        "c",
        "command('/compare')",
        "Compare",
        "the last run simulated under two policies (/compare serial)",
        4,
    ),
    Key(
        "r",
        "r",
        "command('/race')",
        "Race",
        f"the same burst under {RIVALS[0]}, then {RIVALS[1]} (measured)",
        5,
    ),
    Key(
        "R",
        "R",
        "command('/race last')",
        "Last race",
        "the last race once more: its timelines and its figures",
    ),
    Key("x", "x", "command('/cancel')", "Cancel", "cancel the selected slot's request", 9),
    Key(
        "X",
        "X",
        "command('/cancel all')",
        "Cancel all",
        "cancel all requests, waiting ones too",
        14,
    ),
    Key(
        "l",
        "l",
        "command('/load')",
        "Load",
        "a steady load of random prompts: on, off (/load 8: 8 a second)",
        11,
    ),
    Key(
        "L",
        "L",
        "command('/elephant')",
        "Elephant",
        "drop a prompt as long as a slot into the chats: their gaps, and what the budget trades",
        12,
    ),
    Key(
        "left_square_bracket",
        "[ ]",
        "command('/budget -')",
        "Less budget",
        "a step's budget: half as much of a prompt in a step, or twice (/budget 300, /budget off)",
    ),
    Key("right_square_bracket", "]", "command('/budget +')", "More budget", ""),
    Key("e", "e", "settings", "Settings", "change temperature, longest answer, seed, burst", 12),
    Key("up", "↑ ↓", "choose(-1)", "Slot above", "select a slot"),
    Key("down", "↓", "choose(1)", "Slot below", ""),
    Key(
        "left",
        "← →",
        "move(-1)",
        "Earlier",
        "go back in time by a column of the timeline, and forth",
    ),
    Key("right", "→", "move(1)", "Later", ""),
    Key(
        "shift+left,comma",
        ", .",
        "nudge(-1)",
        "A step earlier",
        "a single step back, or on (shift and an arrow, too)",
    ),
    Key("shift+right,full_stop", ".", "nudge(1)", "A step later", ""),
    Key("pageup", "PgUp PgDn", "move(-40)", "Much earlier", "forty columns back, or on"),
    Key("pagedown", "PgDn", "move(40)", "Much later", ""),
    Key("home", "Home", "move(-100000)", "Oldest", "the oldest step that is remembered"),
    Key("end,escape", "End", "follow", "Newest", "follow the newest step again"),
    Key("z", "z", "zoom", "Zoom", "steps in a column of the timeline: 1, 2, 4, 8, to fit"),
    Key(
        "v",
        "v",
        "view",
        "View",
        "other charts: why batching pays, waits; on a small screen other panes, too",
        8,
    ),
    Key(
        "f",
        "f",
        "open",
        "Finished",
        "finished requests, the newest first: figures, steps, prompt, text; y copies",
        10,
    ),
    Key(
        "w",
        "w",
        "why",
        "Why",
        "why a request waited: its life in parts, and by replay under each policy",
        10,
    ),
    Key(
        "B",
        "B",
        "command('/bill')",
        "Bill",
        "the bill of a step: bytes, arithmetic and Python, under this machine's roof",
    ),
    Key(
        "a",
        "a",
        "command('/same')",
        "Same answer",
        "one prompt alone, then 200 times among random neighbours: how many answers? (/same 50)",
        17,
    ),
    Key(
        "K",
        "K",
        "sheet('break')",
        "Break it",
        "an exception, NaN, a client that vanishes, 10,000 requests: who ends, who goes on?",
        18,
    ),
    Key(
        "t",
        "t",
        "sheet('totals')",
        "Totals",
        "what each busy period came to: compare bursts and policies",
        10,
    ),
    Key(
        "g",
        "g",
        "go",
        "Go",
        "from the step to the selected slot's request; there, from a request to its steps",
    ),
    Key(
        "h",
        "h",
        "sheet('clients')",
        "Clients",
        "what asks over HTTP (--serve, --watch), and what was refused",
        13,
    ),
    Key(
        "E",
        "E",
        "sheet('errors')",
        "Errors",
        "what has failed in here, with file and line: the tracebacks",
    ),
    Key("y", "y", "copy", "Copy", "copy the selected slot's text"),
    Key("d", "d", "theme", "Theme", "dark or light; more themes in the palette, ctrl+p", 15),
    Key(
        "ctrl+z",
        "Ctrl-Z",
        "suspend_process",
        "Suspend",
        "give the terminal back to the shell; fg goes on",
    ),
    Key(
        "T",
        "T",
        "tour",
        "Tour",
        "scenes of a minute: each asks what will happen next, lets it happen, and explains it",
    ),
    Key("question_mark", "?", "sheet('help')", "Help", "this page", 1),
    Key("q,ctrl+c", "q", "quit", "Quit", "quit at once (Ctrl-C always)", 2),
)
# Keys that work on a page, too: they open another one, lead to the prompt box, or say what they
# have done.
ON_A_SHEET = ("theme", "copy", "pause", "go", "suspend_process", "settings", "open", "why")
ON_A_SHEET += tuple(key.action for key in KEYS if key.action.startswith("sheet("))
ON_A_SHEET += (
    "command('/bill')",
    "command('/same')",
    "command('/cancel all')",
    "command('/step')",
    "command('/compare')",
    "command('/race')",
    "command('/race last')",
    "command('/slow -')",
    "command('/slow +')",
    "command('/slow off')",
    "command('/elephant')",
    "command('/budget -')",
    "command('/budget +')",
)
OF_THE_ENGINE = (
    "pause",
    *(
        f"command('/{name}')"
        for name in (
            "step",
            "policy",
            "race",
            "same",
            "break",
            "load",
            "slow -",
            "slow +",
            "slow off",
            "budget -",
            "budget +",
            "elephant",
        )
    ),
)
# While the tour has the keyboard: what it asks for, and what only looks
TOURING = (
    Key("", "1-4", "", "Guess", "", 1),
    Key("", "enter", "go_on", "Go on", "", 1),
    Key("", "esc", "leave_tour", "Leave the tour", "", 1),
)
LOOKS = ("quit", "theme", "suspend_process", "choose", "move", "nudge", "follow", "zoom", "view")
LOOKS += ("copy", "open", "why", "go", "sheet")
TYPING = (Key("", "enter", "fire", "Fire", "", 1), Key("", "esc", "leave", "Keys:", "", 1))
WORDS = (
    (
        "slot",
        "one request's place in the KV cache, of a fixed length. A request owns one from admission to its end.",
    ),
    ("row", "one token's place in a slot: its key and its value, in every layer."),
    (
        "prefill ▒",
        "the prompt goes into the slot, a chunk a step. After the last chunk comes the first token.",
    ),
    (
        "decode █",
        "one more token for each slot whose prompt is in, all of them in one pass through the weights.",
    ),
    (
        "reused ▓",
        "rows taken over from a request that began alike, prompt or answer: they are not computed again.",
    ),
    (
        "remembered ░",
        "rows of its last request, prompt and answer, that a free slot holds until it is used again.",
    ),
    ("blocked ╳", "the slot is free and requests wait, but the policy keeps it shut."),
    ("held ┈", "in a slot, but the step's budget was spent, or what it shares is being written."),
    ("ghost ▚", "computed for nothing: the end of its request is seen one step late."),
    (
        "chunk",
        "a piece of a prompt, cut where the step's budget ends. Far back a token costs more, so it has fewer.",
    ),
    (
        "budget",
        "what a step may cost: 1 for a token, more if it looks far back. One whole chunk may always go in.",
    ),
    (
        "elephant",
        "a prompt as long as a slot, among chats: what a chunk of it costs them, and a small chunk costs it.",
    ),
    (
        "run-ahead",
        "a step starts before the one before is read back. While paused or in slow motion it waits for it.",
    ),
    (
        "slow motion",
        "so many steps a second. The engine's clock stands still in between, so all figures stay true.",
    ),
    (
        "plan",
        "the scheduler decides what the step does: who is admitted, which chunks go in, which slots decode.",
    ),
    ("build", "Python describes the step to MLX, as a graph. Nothing is computed yet."),
    (
        "device",
        "MLX queues the graph. On a CPU the device works meanwhile; on a GPU this launches the kernels.",
    ),
    ("wait", "until the device has done the rest, and the new tokens can be read."),
    (
        "commit",
        "the new tokens are handed to their requests; those that have ended leave their slots.",
    ),
    (
        "Python",
        "of a step's time, its own work: plan, build and commit. The rest of the time is device and wait.",
    ),
    (
        "clock",
        "the engine's. Its seconds beyond those of undisturbed steps are interruptions: other programs ran.",
    ),
    (
        "others",
        "other programs take so many of the cores, and none is idle: slow steps are theirs, not the engine's.",
    ),
    (
        "hash",
        "a short name for many numbers: an answer's tokens and log probabilities. Another bit, another hash.",
    ),
    ("batch size", "how many slots did useful work at a time."),
    ("useful", "the share of slots × steps in which a slot prefilled or decoded for a request."),
    (
        "client",
        "a program that asks over HTTP. If it hangs up (╳), its slot is free; what is refused never gets one.",
    ),
    (
        "batching",
        "why it pays: of steps with so many rows, the lower quartile of their time, and its tokens/s.",
    ),
    (
        "roof",
        "what this machine can do at most: bytes read and operations a second. Measured when B is pressed first.",
    ),
    (
        "arithmetic",
        "operations of a step: a product and a sum are two. A weight is read once for all rows, multiplied for each.",
    ),
    ("p50, p95", "half of all, or 95 in 100, took no longer than this."),
    ("TTFT", "time to first token: from firing a prompt to the first token of its answer."),
    ("makespan", "from the first arrival to the last token of all, without interruptions."),
    (
        "✗ ✓",
        "with a grammar: the newest token (100% if it was forced), and what the model would have said. ✗: forbidden.",
    ),
    (
        "demo",
        "the model in the repository. It adds up to 99; what is larger comes out wrong, and nothing is broken.",
    ),
    (
        "commands",
        f"in the prompt box: {'  '.join(f'/{name} {rest}'.strip() for name, rest in COMMANDS.items())}",
    ),
)


def only_looks(action: str) -> bool:
    """Does it leave the engine alone?"""
    return action.partition("(")[0] in LOOKS


def pressed(line: str) -> str:
    """The key that does what a line says; without one, the line itself; a prompt is typed."""
    if not line.startswith("/"):
        return "i and a prompt" if len(line) > 1 else line
    if line in ("/pause", "/resume"):
        return "space"
    by_line = {key.action: key.show for key in KEYS}
    return by_line.get(f"command('{line}')", line)


def draw_keys(state: State, on: Paper) -> None:
    """The footer. Each entry can be clicked, whether the prompt has the keyboard or not."""
    keys = [*TYPING, *KEYS[3:]] if state.typing else list(KEYS)
    if state.tour:
        keys = [*TOURING, *(key for key in KEYS if only_looks(key.action))]
    if state.view.watches:
        keys = [key for key in keys if key.action not in OF_THE_ENGINE]
    ways = {}  # the keys that lead out of where the engine is come first
    if state.view.paused and not state.tour:
        ways = {"pause": ("Go on", 1), "command('/step')": ("Step", 1), "view": ("View", 2)}
    elif state.view.slow and not state.tour:
        ways = {
            "command('/slow off')": ("Full speed", 1),
            "pause": ("Pause", 2),
            "command('/slow -')": ("Slower", 3),
        }
        ways |= {"view": ("View", 3), "command('/slow +')": ("Faster", 4)}
    for i, key in enumerate(keys):
        if key.action in ways:
            label, rank = ways[key.action]
            keys[i] = key._replace(label=label, footer=rank)
    shown = set()
    left = on.width
    for key in sorted(filter(lambda key: key.footer, keys), key=lambda key: key.footer):
        if (need := cell_len(f"{key.show} {key.label} ")) <= left:
            shown.add(key)
            left -= need
    pen = on.pen().put(" ")
    for key in keys:
        if key in shown:
            pen.put(key.show, on.accent, True, key.action).put(f" {key.label}", do=key.action)
            pen.put(" ")


def draw_help(state: State, on: Paper) -> None:
    """Keys, then words, then policies: as many lines as it takes. The sheet that shows them can be
    scrolled."""
    on.title("Help: keys", "↑↓ scroll  Esc back")
    keys = [key for key in KEYS if key.help]
    across = 2 if on.width >= 140 else 1
    wide = on.width // across
    tall = -(-len(keys) // across)
    for row in range(tall):
        beside = [(key, wrap(key.help, wide - 13)) for key in keys[row::tall]]
        for i in range(max(len(parts) for _, parts in beside)):
            pen = on.pen()
            for column, (key, parts) in enumerate(beside):
                show = "" if i else key.show
                pen.to(column * wide).put(f" {show:<10}", on.accent, True, key.action)
                pen.put("".join(parts[i : i + 1]), do=key.action)
    on.heading("Words")
    on.names = 13
    for name, text in WORDS:
        on.entry(name, text)
    for name, policy in POLICIES.items():
        on.entry(name, f"a policy: {policy.does}")


def completions(line: str) -> list[str]:
    """Every line that begins like this one: commands, and the words that may stand behind some."""
    if not line.startswith("/"):
        return []
    name, blank, rest = line.removeprefix("/").partition(" ")
    if not blank:
        found = [f"/{command}" for command in COMMANDS if command.startswith(name)]
        return [f"{found[0]} "] if len(found) == 1 and COMMANDS[found[0][1:]] else found
    before, _, last = rest.rpartition(" ")
    words = [word for word in ARGUMENTS.get(name, ()) if word.startswith(last)]
    start = f"/{name} {before} " if before else f"/{name} "
    return [start + word for word in words]
