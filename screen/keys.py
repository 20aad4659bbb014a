"""The table of keys and pages, the footer, and the help.

Footer, help, palette and key bindings are made from one table, `Menu`, so they cannot disagree. It
has the keys and pages of the screen, and the experiments that `tui.py` passes to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from policies import POLICIES
from screen.draw import step
from screen.draw.canvas import Canvas
from screen.draw.style import wrap
from screen.page import Key, Page
from screen.pages import (
    busy_periods,
    conversation,
    error_log,
    http_requests,
    request_details,
)
from screen.state import State

# The commands without a page, each with an example
OTHERS = {
    "burst": "8",
    "json": "Tell me about a fox.",
    "policy": "static",
    "load": "2",
    "cancel": "7",
    "pause": "",
    "resume": "",
    "step": "10",
    "slow": "8",
    "budget": "64",
    "model": "qwen-coder",
    "set": "temperature=0.8 max=64",
    "new": "",
    "system": "Be brief.",
    "next": "",
    "again": "",
    "thoughts": "",
    "drop": "",
    "quit": "",
}
# Commands that change the engine, so they are refused while the screen watches a server
OF_THE_ENGINE = ("policy", "load", "pause", "resume", "step", "slow")
ARGUMENTS = {
    "policy": POLICIES,
    "cancel": ("all",),
    "slow": ("off",),
    "load": ("off",),
    "budget": ("off",),
    "set": ("temperature=", "max=", "seed=", "burst=", "rate=", "client="),
}
# Actions that do not affect the engine
HARMLESS = ("choose", "move", "leaf", "back", "nudge", "follow", "zoom", "view", "quit", "theme")
HARMLESS += ("suspend_process", "copy", "go")
TYPING = (Key("", "enter", "fire", "Fire", "", 1), Key("", "esc", "leave", "Keys:", "", 1))
# action -> its label and rank in the footer in three states: paused, in slow motion, in a
# conversation
OUT_OF_A_PAUSE = {"pause": ("Go on", 1), "command('/step')": ("Step", 1), "view": ("View", 2)}
OUT_OF_SLOW_MOTION = {
    "command('/slow off')": ("Full speed", 1),
    "pause": ("Pause", 2),
    "command('/slow -')": ("Slower", 3),
    "view": ("View", 3),
    "command('/slow +')": ("Faster", 4),
}
IN_A_TALK = {
    "prompt": ("Ask", 1),
    "page('talk')": ("Panes", 2),
    "command('/next')": ("Next", 3),
    "command('/again')": ("Ask again", 4),
    "copy": ("Copy", 5),
}
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
    (
        "checkpoint ┃",
        "where a state is kept that other prompts may start from, in models with states (docs/slots.md).",
    ),
    ("blocked ╳", "the slot is free and requests wait, but the policy admits none."),
    ("held ┈", "in a slot, but the step's budget was spent, or what it shares is being written."),
    ("ghost ▚", "computed for nothing: the end of its request is seen one step late."),
    (
        "chunk",
        "a part of a prompt, cut where the step's budget ends.",
    ),
    (
        "budget",
        "the most tokens of a step. While somebody decodes, as many of a prompt as fit into its time (--step-ms).",
    ),
    (
        "run-ahead",
        "a step starts before the one before is read back. While paused or in slow motion it waits for it.",
    ),
    (
        "slow motion",
        "a limit of steps per second. The engine's clock stops in between, so all figures stay true.",
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
        "cores that other programs use while none is idle: they make steps slow, not the engine.",
    ),
    ("batch size", "number of slots that work for a request at a time."),
    (
        "slots used",
        "the share of slots × steps in which a slot prefilled or decoded for a request; not wrong draft tokens.",
    ),
    (
        "¹ ² ³",
        "the number of tokens of a step that checked drafts. A wrong draft costs its row, and nothing else.",
    ),
    (
        "client",
        "a program that sends requests over HTTP. If it hangs up (╳), its slot is free.",
    ),
    (
        "batching",
        "why it pays: by number of rows, the lower quartile of a step's time, and its tokens/s.",
    ),
    (
        "rows (avx2)",
        "our own matrix product, compiled for this processor: rows are independent, so a batch changes no bit.",
    ),
    ("p50, p95", "half of all, or 95 in 100, took no longer than this."),
    ("TTFT", "time to first token: from firing a prompt to the first token of its answer."),
    ("makespan", "from the first arrival to the last token of all, without interruptions."),
    (
        "✗ ✓",
        "with a grammar: the newest token (100% if it was forced), │ and the likeliest without it. ✗: forbidden.",
    ),
    (
        "demo",
        "the model in the repository. It adds up to 99; what is larger comes out wrong, and nothing is broken.",
    ),
)


# The page for a step whose description does not fit in the pane
STEP = Page("plan", "", "Step", "", step.draw_step)
REQUEST = request_details.PAGE  # the page that opens for a request
PROMPT_KEYS = (
    Key("i", "i", "prompt", "Prompt", "type a prompt: Enter fires it, ctrl+j breaks the line", 3),
    Key(
        "slash",
        "/",
        "prompt('/')",
        "Command",
        "type a command; tab completes, and the end of this page names them all",
    ),
)
HELP = "help"
EXPERIMENTS = "Experiments"
SCREEN = "The screen"
QUIT = Key("q,ctrl+c", "q", "quit", "Quit", "quit at once (Ctrl-C always)", 2)
# All keys by group, in the order of the footer and the help. A new page is one line here.
GROUPS: dict[str, tuple[Key | Page, ...]] = {
    "Prompts and conversations": (
        *PROMPT_KEYS,
        conversation.PAGE,
        Key(
            "n,ctrl+n",
            "n",
            "command('/next')",
            "Next talk",
            "the next conversation (ctrl+n, in the prompt box too); /new begins another",
        ),
        Key(
            "u,ctrl+r",
            "u",
            "command('/again')",
            "Ask again",
            "ask the last question of the conversation once more (ctrl+r, in the prompt box too)",
        ),
        Key(
            "enter", "enter", "fire", "Fire", "fire the prompt that is in the box, or type one", 10
        ),
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
    ),
    "The engine": (
        Key(
            "space", "space", "pause", "Pause", "stop the engine between two steps; again: go on", 7
        ),
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
    ),
    "Policy, load and budget": (
        Key(
            "p",
            "p",
            "command('/policy')",
            "Policy",
            "the next policy: drain the slots, then switch",
            6,
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
            "left_square_bracket",
            "[ ]",
            "command('/budget -')",
            "Less budget",
            "a step's budget: half as much of a prompt in a step, or twice (/budget 300, /budget off)",
        ),
        Key("right_square_bracket", "]", "command('/budget +')", "More budget", ""),
        Key(
            "M",
            "M",
            "command('/model')",
            "Next model",
            "watch the next model of a server that has several (/model NAME: that one)",
        ),
        Key(
            "e", "e", "settings", "Settings", "change temperature, longest answer, seed, burst", 12
        ),
    ),
    EXPERIMENTS: (),  # passed to `Menu`
    "Slots and steps": (
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
        Key(
            "pageup",
            "PgUp PgDn",
            "leaf(-1)",
            "Much earlier",
            "forty columns back, or on; in a conversation, half a page of it",
        ),
        Key("pagedown", "PgDn", "leaf(1)", "Much later", ""),
        Key("home", "Home", "move(-100000)", "Oldest", "the oldest step that is remembered"),
        Key("end", "End", "follow", "Newest", "follow the newest step again; Esc, too"),
        Key("escape", "Esc", "back", "Back", ""),
        Key("z", "z", "zoom", "Zoom", "steps in a column of the timeline: 1, 2, 4, 8, to fit"),
        Key(
            "v",
            "v",
            "view",
            "View",
            "other charts: why batching pays; on a small screen other panes, too",
            8,
        ),
    ),
    "Pages": (
        request_details.PAGE,
        busy_periods.PAGE,
        Key(
            "g",
            "g",
            "go",
            "Go",
            "from the step to the selected slot's request; there, from a request to its steps",
        ),
        http_requests.PAGE,
        error_log.PAGE,
    ),
    SCREEN: (
        Key("y", "y", "copy", "Copy", "copy the selected slot's text"),
        Key("P", "P", "screenshot", "Picture", "save what is on the screen as a picture, an SVG"),
        Key("d", "d", "theme", "Theme", "dark or light; more themes in the palette, ctrl+p", 15),
        Key(
            "ctrl+z",
            "Ctrl-Z",
            "suspend_process",
            "Suspend",
            "give the terminal back to the shell; fg goes on",
        ),
    ),
}


class Menu:
    """All keys and pages of a screen, including the pages and keys of the given experiments."""

    def __init__(self, experiments: Sequence[Key | Page] = ()):
        help = Page(
            HELP,
            "question_mark",
            "Help",
            "this page",
            self.draw_help,
            footer=1,
            log_lines=lambda state: [" ".join(f"/{name}" for name in sorted(self.commands))],
            own={"space": "leaf(1)"},  # as in a pager
            is_early=True,
        )
        self.experiments = experiments
        last = (*GROUPS[SCREEN], help, QUIT)
        self.groups = GROUPS | {EXPERIMENTS: tuple(experiments), SCREEN: last}
        table = [entry for group in self.groups.values() for entry in group]
        self.keys = [entry.shortcut if isinstance(entry, Page) else entry for entry in table]
        self.pages = {page.name: page for page in (*table, STEP) if isinstance(page, Page)}
        pages = self.pages.values()
        self.commands = OTHERS | {page.name: page.example for page in pages}
        self.arguments = ARGUMENTS | {page.name: page.words for page in pages}
        self.strip = next((page for page in pages if page.is_strip), None)
        self.panes = {
            "strip" if page.is_strip else page.name: page.pane for page in pages if page.pane
        }
        self.hints = tuple(page.hint for page in pages if page.hint)

    def page_of(self, action: str) -> Page | None:
        """Return the page that an action opens, if any."""
        return next((page for page in self.pages.values() if page.shortcut.action == action), None)

    def is_harmless(self, action: str) -> bool:
        """True if an action does not affect the engine."""
        page = self.page_of(action)
        return (not page.obey or page.has_request) if page else action.partition("(")[0] in HARMLESS

    def changes_engine(self, action: str) -> bool:
        """True if an action changes the engine, other than by firing or cancelling requests."""
        page = self.page_of(action)
        name = action.removeprefix("command('/").split()[0].rstrip("')")
        return page.disturbs if page else name in (*OF_THE_ENGINE, "budget")

    def pressed(self, line: str) -> str:
        """Return how a user enters a line: the key of its command, or the line if it has no key."""
        if not line.startswith("/"):
            return "i and a prompt" if len(line) > 1 else line
        if line in ("/pause", "/resume"):
            return "space"
        shows = {key.action: key.show for key in self.keys}
        return shows.get(f"command('{line}')") or shows.get(f"page('{line[1:]}')", line)

    def completions(self, line: str) -> list[str]:
        """Return the lines that complete this one: commands and their arguments."""
        if not line.startswith("/"):
            return []
        name, blank, rest = line.removeprefix("/").partition(" ")
        if not blank:
            found = [f"/{command}" for command in self.commands if command.startswith(name)]
            is_whole = len(found) == 1 and self.commands[found[0][1:]]
            return [f"{found[0]} "] if is_whole else found
        last = rest.rpartition(" ")[2]
        words = [word for word in self.arguments.get(name, ()) if word.startswith(last)]
        return [line.removesuffix(last) + word for word in words]

    def draw_keys(self, state: State, on: Canvas) -> None:
        """Draw the footer. Its entries can be clicked even while the prompt box has the focus."""
        keys = [*TYPING, *self.keys[3:]] if state.typing else list(self.keys)
        ways = {}
        if state.strip:  # the strip's keys, and keys that do not affect the engine
            harmless = (key for key in self.keys if self.is_harmless(key.action))
            keys = [*self.strip.strip_keys(state), *harmless]
        elif state.view.paused:
            ways = OUT_OF_A_PAUSE
        elif state.view.slow:
            ways = OUT_OF_SLOW_MOTION
        if state.view.watches:
            keys = [key for key in keys if not self.changes_engine(key.action)]
        if state.chatting:
            ways = ways | IN_A_TALK
        for i, key in enumerate(keys):
            if key.action in ways:
                label, rank = ways[key.action]
                keys[i] = key._replace(label=label, footer=rank)
        shown = set()
        left = on.width
        for key in sorted(keys, key=lambda key: key.footer):
            need = cell_len(f"{key.show} {key.label} ")
            if key.footer and need <= left:
                shown.add(key)
                left -= need
        pen = on.pen().put(" ")
        for key in keys:
            if key in shown:
                pen.put(key.show, on.accent, True, key.action)
                pen.put(f" {key.label}", do=key.action).put(" ")

    def draw_help(self, state: State, on: Canvas) -> None:
        """Draw the keys by group, then the words, the commands and the policies."""
        on.title("Help: keys", "↑↓ scroll  Esc back")
        for name, entries in self.groups.items():
            keys = [entry.shortcut if isinstance(entry, Page) else entry for entry in entries]
            if keys:
                on.pen().put(f" {name}", bold=True)
                draw_group([key for key in keys if key.help], on)
        on.heading("Words")
        on.names = 13
        for name, text in self.words:
            on.entry(name, text)
        commands = "  ".join(f"/{name} {rest}".strip() for name, rest in self.commands.items())
        on.entry("commands", f"in the prompt box: {commands}")
        for name, policy in POLICIES.items():
            on.entry(name, f"a policy: {policy.does}")

    @property
    def words(self) -> tuple[tuple[str, str], ...]:
        """The words of the screen and of the experiments, with their meanings."""
        pages = [page for page in self.experiments if isinstance(page, Page)]
        return (*WORDS, *(word for page in pages for word in page.explains))


def draw_group(keys: Sequence[Key], on: Canvas) -> None:
    """Draw a group of keys, in two columns if there is room."""
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


def split_command(line: str) -> tuple[str | None, str]:
    """Split a command into its name and its arguments. For a prompt, return None and the prompt."""
    if not line.startswith("/") or line.startswith("//"):
        return None, line.removeprefix("/")
    name, _, rest = line[1:].partition(" ")
    return name, rest.strip()
