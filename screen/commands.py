"""The user's prompts, commands and scripts, and the plain log of a run.

A line that begins with a slash is a command; any other line is a prompt. Keys, clicks, the palette
and scripts all call `Session.obey`, so they can do the same things.
"""

from __future__ import annotations

import math
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING

from base.installation import command
from base.validation import read_real, read_whole, shown
from engine.snapshot import Limits, RequestView, Snapshot
from policies import POLICIES, policy_of
from screen.busy_period_stats import words
from screen.draw.style import clean, count, in_time, number, shorten, span
from screen.engine_client import LocalEngineClient
from screen.engine_view import View
from screen.keys import OF_THE_ENGINE, Menu, split_command
from screen.page import Page
from screen.state import State, client_of, prompt_of
from screen.workload import SCHEMA, Ask, is_mute

if TYPE_CHECKING:
    from experiments.experiment import Experiment


def read_name(name: str, text: str, least: int, most: int) -> str:
    if len(text) > most:
        raise ValueError(f"{name} has {len(text)} characters, {most} at most")
    return text


SETTABLE = {  # for /set: name -> field, parser, limits
    "temperature": ("temperature", read_real, 0, 1_000_000),
    "max": ("max_tokens", read_whole, 1, 2**20),
    "seed": ("seed", read_whole, 0, 2**31 - 1),
    "burst": ("burst", read_whole, 1, 1000),
    "rate": ("rate", read_real, 0.01, 1000),
    "client": ("client", read_name, 0, 20),
}


NUMBERS = {  # commands with a number -> parser, limits
    "burst": (read_whole, 1, 1000),
    "cancel": (read_whole, 0, 2**31),
    "step": (read_whole, 1, 100_000),
    "load": (read_real, 0, 1000),
    "slow": (read_real, 0.1, 1000),
    "budget": (read_whole, 1, 2**31),
}

WATCHES = "this screen only watches: it fires prompts and cancels its own, and changes nothing else"
SLOW = 16  # steps per second of the first burst
# Limits of the keys - and +
SLOWEST = 1
FASTEST = 128


class Session:
    """An engine client and the state of a screen. `obey` runs every line that the user enters.

    `eases`: run the first burst in slow motion, because a small model is too fast to watch.
    `stays`: an experiment runs until its page is closed; in a log or a script it ends by itself.
    """

    def __init__(
        self, client: LocalEngineClient, state: State, menu: Menu | None = None, eases: bool = False
    ):
        self.client = client
        self.state = state
        self.menu = menu or Menu()
        state.hints = self.menu.hints
        self.eases = eases
        self._seen = 0
        # View fields that queued commands will change
        self._coming: dict[str, object] = {}
        self.stays = False
        self.has_chats = False  # on a screen, prompts belong to conversations

    @property
    def handled(self) -> bool:
        """True if the view shows the effect of every command."""
        return self.state.view.handled == self.client.posted

    @property
    def takes_prompts(self) -> bool:
        """True if a model is loaded, or a prompt would load it."""
        return self.state.view.stage == "ready" or bool(self.client.asleep)

    @property
    def busy(self) -> bool:
        """True if the engine works. The last view of an unloaded model may still show requests."""
        return self.state.view.busy and not self.client.asleep

    @property
    def settled(self) -> bool:
        """True if every command has run and nothing is left to do."""
        return self.handled and not self.busy and not self.state.view.stepping

    @property
    def coming(self) -> View:
        """The view after all queued commands, because keys may arrive faster than views."""
        return self.state.view if self.handled else self.state.view._replace(**self._coming)

    def expect(self, **changes: object) -> None:
        """Record the changes that the next command will make."""
        self._coming = changes if self.handled else self._coming | changes

    def refresh(self) -> bool:
        """Absorb the newest view. Return False if nothing has changed."""
        news = self.client.news
        if news == self._seen:
            return False
        self._seen = news
        before = self.state.view
        self.state.absorb(self.client.view_since(before))
        for page in self.menu.pages.values():
            if page.on_view:
                page.on_view(self.state, before)
        self._send_waiting()
        return True

    def asks(self, count: int) -> list[Ask]:
        """Return `count` prompts, repeating the list if needed. Each gets its own seed, if one is
        set."""
        prompts = islice(cycle(self.state.prompts), count)
        return [
            self.state.settings.ask(prompt, most, i) for i, (prompt, most) in enumerate(prompts)
        ]

    def obey(self, line: str) -> str:
        """Run a prompt or a command, and return a message. An invalid line raises ValueError."""
        name, rest = split_command(line)
        if name is None:
            is_beyond = self.state.model == "demo" and re.search(r"\d{3}", line)
            return self._ask(rest) or ("the demo adds up to 99 only" if is_beyond else "")
        if self.state.view.watches and name in OF_THE_ENGINE:
            raise ValueError(WATCHES)
        page = self.menu.pages.get(name)
        if page:
            return (page.obey and page.obey(self, rest)) or ""
        command = RUN.get(name)
        if command is None:
            there = " ".join(f"/{command}" for command in sorted(self.menu.commands))
            raise ValueError(f"/{name} is not a command; there are {there}")
        return command(self, rest) or ""

    # --- conversations

    def _ask(self, prompt: str) -> str:
        """Ask the prompt in the open conversation, or in a new one if no conversation is shown. Outside a
        screen, just fire it."""
        chats = self.state.chats
        if not self.has_chats:
            self.client.fire([self.state.settings.ask(prompt)])
            return ""
        if not self.state.chatting:
            chats.begin_chat()
        if chats.open.waiting:
            raise ValueError(
                chats.open.why or "a question is already waiting: Esc stops the answer"
            )
        chats.open.waiting = prompt
        self._send_waiting()
        return "it waits for the answer" if chats.open.waiting else ""

    def _send_waiting(self) -> None:
        """Fire waiting questions that fit and whose conversation has no running answer."""
        for chat in self.state.chats.all:
            if chat.waiting and not (chat.why or chat.runs):
                ask = self.state.settings.ask(chat.waiting)
                ask = ask._replace(messages=chat.messages(chat.waiting))
                self.client.fire([ask._replace(question=self.state.chats.add(chat))])

    def new_chat(self, rest: str) -> str:
        """Begin a conversation. A question that did not fit in the open one moves to it."""
        self.state.chats.begin_chat()
        self._send_waiting()
        return "a new conversation"

    def set_system(self, rest: str) -> str:
        self.state.chats.open.system = rest
        return "from the next question on"

    def next_chat(self, rest: str) -> None:
        """Open the next conversation; after the last, the first."""
        chats = self.state.chats
        chats.at = (chats.at + 1) % len(chats.all)
        self.state.select_chat()

    def drop_turn(self, rest: str) -> str:
        """Drop the oldest turn, and retry a question that did not fit."""
        chat = self.state.chats.open
        turns = [turn for turn in chat.turns if not (turn.is_dropped or turn.runs)]
        if not turns:
            raise ValueError("there is no answered question to forget")
        turns[0].is_dropped = True
        chat.why = ""
        self._send_waiting()
        return "the oldest question is forgotten"

    def ask_again(self, rest: str) -> None:
        """Ask the last question once more."""
        chat = self.state.chats.open
        if chat.runs or chat.waiting or not chat.turns:
            raise ValueError("only when the last question has its answer (Esc stops that)")
        chat.waiting = chat.turns.pop().question
        self._send_waiting()

    def toggle_thoughts(self, rest: str) -> None:
        """Switch between full and folded thoughts."""
        self.state.chats.unfolded = not self.state.chats.unfolded

    def stop(self) -> bool:
        """Stop the running answer of the open conversation. Return False if there is none."""
        running = self.state.chats.open.runs
        if running and running.request and not running.is_stopped:
            running.is_stopped = True
            self.client.cancel(running.request.id)
            return True
        return False

    def burst(self, rest: str) -> str:
        many = number_for("burst", rest or str(self.state.settings.burst))
        eases = self.eases and not self.coming.paused
        self.eases = False
        self.client.fire(self.asks(many))
        if not eases:
            return f"{count(many, 'prompt')} fired"
        self.expect(slow=SLOW)
        self.client.slow(SLOW, True)
        return "slowly: + faster, 0 full speed"

    def ask_json(self, rest: str) -> str:
        """Fire a prompt with a JSON schema.

        If a user is watching and nothing else runs, pause first, so that each token can be seen.
        """
        ask = self.state.settings.ask(rest or "Tell me a story about a fox.")
        if self.stays and not (self.coming.busy or self.state.view.watches):
            self.pause("")
        self.client.fire([ask._replace(schema=SCHEMA)])
        return "JSON is asked for: s shows how, token by token"

    def run_experiment(self, experiment: Experiment) -> None:
        """Start an experiment and resume a paused engine. Raise ValueError if other clients would suffer."""
        self.check_alone(experiment.what)
        self.expect(paused=False)
        self.client.run_experiment(experiment)

    def check_alone(self, what: str) -> None:
        if self.state.view.server or self.state.view.watches:
            whose = "while a server runs" if self.state.view.server else "on a watched engine"
            raise ValueError(
                f"no {what} {whose}, because its clients would suffer; start a {command('tui.py')} for it"
            )

    def switch_policy(self, rest: str) -> None:
        """Change to the named policy, or to the next one."""
        self.client.switch(policy_of(rest).name if rest else "")

    def watch_model(self, rest: str) -> str:
        """Watch the named model of a server, or the next one."""
        if not self.state.view.watches:
            return (
                "there is one model here; with --watch, M shows each of a server that has several"
            )
        return f"{self.client.watch_model(rest)} is watched from here on"

    def set_load(self, rest: str) -> None:
        """Set a steady load in requests per second. Without a number, turn it on or off."""
        off = rest == "off" or (not rest and self.coming.load)
        rate = 0.0 if off else number_for("load", rest or str(self.state.settings.rate))
        self.expect(load=rate)
        self.client.set_load(rate, self.asks(len(self.state.prompts)))

    def cancel(self, rest: str) -> str:
        """Cancel all of this screen's requests, the named one, or the one in the selected slot."""
        if rest == "all":
            self.client.cancel(None)
            whose = "your requests" if self.state.view.server else "requests"
            return f"all {whose} are cancelled"
        if rest:
            owner = number_for("cancel", rest.removeprefix("r"))
        else:
            slot = self.state.selected
            engine = self.state.view.engine
            owner = engine.slots[slot].request if engine else None
            if owner is None:
                return f"slot {slot} has no request" if engine else "no slot has a request yet"
        if owner not in self.client.own:
            request = self.state.requests.get(owner)
            if request is None and self.handled:
                raise ValueError(f"r{owner} is not known here; it may have ended long ago")
            if request and request.reason:
                raise ValueError(f"r{owner} has ended already ({request.reason})")
            if request:
                raise ValueError(f"r{owner} is a client's: it ends when its client hangs up")
        self.client.cancel(owner)
        return f"r{owner} is cancelled"

    def pause(self, rest: str) -> None:
        self.expect(paused=True)
        self.client.pause(True)

    def resume(self, rest: str) -> None:
        self.state.cursor = None
        self.expect(paused=False)
        self.client.pause(False)

    def step(self, rest: str) -> None:
        steps = number_for("step", rest or "1")
        self.state.cursor = None
        self.expect(paused=True)
        self.client.step(steps)

    def slow(self, rest: str) -> str:
        """Limit the steps per second. "off" removes the limit, "-" and "+" halve or double it. Without an
        argument, turn it on or off."""
        now = self.coming.slow
        if rest == "off" or (not rest and now):
            rate = 0.0
        elif rest == "-":
            rate = max(SLOWEST, now / 2) if now else SLOW
        elif rest == "+":
            rate = now * 2 if now * 2 <= FASTEST else 0.0
        else:
            rate = number_for("slow", rest or str(SLOW))
        self.eases = False
        self.expect(slow=rate)
        self.client.slow(rate)
        return f"slow motion: {rate:g} steps/s" if rate else "full speed"

    def set_budget(self, rest: str) -> str:
        """Set the budget of a step.

        "off" restores the initial one; "-" and "+" halve or double the chunk. Without an argument, report it.
        """
        engine = self.coming.engine
        if not rest:
            return (
                said_of(engine, engine.limits)
                if engine
                else "the budget is known when the model is loaded"
            )
        self.check_alone("other budget")
        budget: int | str | None = rest
        if rest not in ("-", "+"):
            budget = None if rest == "off" else number_for("budget", rest)
        said = ""
        if engine:  # otherwise the client refuses impossible budgets
            limits = self.state.view.made_with.adjusted(engine.limits, budget)
            self.expect(engine=replace(engine, limits=limits))
            said = said_of(engine, limits)
        self.client.set_budget(budget)
        return said

    def change_settings(self, rest: str) -> str:
        if not rest:
            return self.state.settings.words
        changes = {}
        for pair in rest.split():
            name, _, value = pair.partition("=")
            if name not in SETTABLE:
                raise ValueError(
                    f"{name!r} cannot be set; temperature, max, seed, burst, rate and client can"
                )
            knob, read, least, most = SETTABLE[name]
            is_none = pair in ("seed=", "seed=none", "temperature=", "temperature=default")
            changes[knob] = None if is_none else read(name, value, least, most)
        said = f"set {rest}"
        engine = self.state.view.engine
        if engine and changes.get("max_tokens", 0) > engine.limits.max_len:
            changes["max_tokens"] = engine.limits.max_len
            said = f"max={engine.limits.max_len}: a slot holds no more"
        self.state.settings = self.state.settings._replace(**changes)
        return said


# The function of each command without a page. The screen and the log handle `quit` themselves
RUN: Mapping[str, Callable[[Session, str], str | None]] = {
    "burst": Session.burst,
    "json": Session.ask_json,
    "policy": Session.switch_policy,
    "load": Session.set_load,
    "cancel": Session.cancel,
    "pause": Session.pause,
    "resume": Session.resume,
    "step": Session.step,
    "slow": Session.slow,
    "budget": Session.set_budget,
    "model": Session.watch_model,
    "set": Session.change_settings,
    "new": Session.new_chat,
    "system": Session.set_system,
    "next": Session.next_chat,
    "again": Session.ask_again,
    "thoughts": Session.toggle_thoughts,
    "drop": Session.drop_turn,
}


def said_of(engine: Snapshot, limits: Limits) -> str:
    words = f"budget {limits.budget:,}: at most {limits.chunk:,} tokens of a prompt in a step"
    return f"{words}{in_time(engine.step_s)}"


def number_for(command: str, text: str) -> float:
    read, least, most = NUMBERS[command]
    return read(command, text, least, most)


# Script words that are not commands, and their actions
SCRIPTED = {"view": "view", "zoom": "zoom"}
SCRIPTED |= {name: f"theme('textual-{name}')" for name in ("light", "dark")}

# The plain log runs a word only when all earlier work has finished, so words that act on running
# work need a screen
LOGGED = ("policy", "burst", "wait", "budget")
ON_A_SCREEN = ("step", "pause", "resume", "slow", "load", "cancel", *SCRIPTED)


def script_help(menu: Menu) -> str:
    logged = ", ".join((*POLICIES, *LOGGED, *menu.pages))
    return f"""what to do after the start, such as 'static burst24' or 'race12': {logged};
on a screen or a screenshot also {", ".join(ON_A_SCREEN)}"""


def orders_of(script: str, menu: Menu, logged: bool = False) -> list[tuple[str, str]]:
    """ "static burst24 step60" -> [("static", ""), ("burst", "24"), ("step", "60")]

    An unknown word or a wrong number raises ValueError. `logged`: the script is for a plain log.
    """
    words = (*POLICIES, *LOGGED, *menu.pages, *(() if logged else ON_A_SCREEN))
    reads = {page.name: page.read for page in menu.pages.values() if page.read}
    numbered = {*NUMBERS, *reads}
    orders = []
    for word in script.lower().split():
        name, rest = re.fullmatch("([a-z_]*)[=:]?(.*)", word).groups()
        if name not in words or (rest and name not in numbered):
            where = " without a screen" if logged else ""
            there = " ".join(f"{word}N" if word in numbered else word for word in words)
            raise ValueError(
                f"{shown(word)} is not a command{where}; there are {there} (N: a number, or nothing)"
            )
        if rest:
            reads[name](rest) if name in reads else number_for(name, rest)
        orders.append((name, rest))
    return orders


def as_command(word: str, rest: str) -> str:
    return f"/policy {word}" if word in POLICIES else f"/{word} {rest}"


class PlainLog:
    """Writes a run as a log with a line for each event: for pipes, log files and screen readers."""

    def __init__(self, session: Session, write: Callable[[str], None]):
        self.session = session
        self.write = lambda line: write(clean(line))  # a line may quote untrusted text
        # request id -> the request as last reported
        self._told: dict[int, RequestView] = {}
        self._faults = 0  # number of faults written
        # (time, line): held back, because an earlier event may still arrive
        self._late: list[tuple[float, str]] = []
        self._told_to = 0.0  # end of the last busy period that was written
        self._policy = ""
        self._asleep = ""  # why the model is not loaded, as last written
        self._epoch = 0
        self._asked: list[Page] = []  # pages to be written

    def refresh(self) -> None:
        state = self.session.state
        before = state.view
        if not self.session.refresh():
            return
        view = state.view
        asleep = self.session.client.asleep
        for stage in view.done[len(before.done) :]:
            if stage != asleep:
                self.write(f"loading: {stage}")
        for call in view.server.ended if view.server else ():
            end = f"{call.status} {call.reason}: {call.message}".rstrip(": ")
            self.write(" ".join(f"{call.client} {call.route} → {end}".split()))
        if view.engine is None:
            if asleep != self._asleep:  # with an engine, this is a fault in the view
                self._asleep = asleep
                self.write_lines([asleep] if asleep else ())
            self.write_lines(fault.message for fault in state.faults[self._faults :])
            self._faults = len(state.faults)
            self._write_pages()
            return
        self._collect_events(view.engine)
        for period in state.periods:
            if period.over and period.ended > self._told_to:
                said = f"in all ({', '.join(period.policies)}): {', '.join(words(period))}"
                self._late.append((period.ended, said))
                self._told_to = period.ended
        last = state.history[-1] if state.history else None
        if self.session.busy and view.engine.planned > (last.step if last else 0):
            # Events after the start of the step in flight are written when it has ended
            self.flush(last.view.began if last else 0.0)
        else:
            self.flush()
        if before.experimenting and not view.experimenting and view.record:
            self._asked.append(self.session.menu.pages[view.record.name])
        self._write_pages()

    def flush(self, until: float = math.inf) -> None:
        """Write all events up to a time, in order."""
        self._late.sort(key=lambda event: event[0])
        while self._late and self._late[0][0] <= until:
            moment, line = self._late.pop(0)
            self.write(f"{moment:8.3f} s  {line}")

    def _collect_events(self, engine: Snapshot) -> None:
        """Collect the events of an engine: requests, policies, faults."""
        state = self.session.state
        if state.view.epoch != self._epoch:  # another engine
            self._epoch = state.view.epoch
            self._told = {}
            if not state.view.is_new:  # do not report its earlier events
                self._told = {r.id: r for r in (*engine.requests, *engine.ended)}
                engine = replace(engine, ended=(), steps=())
        for r in (*engine.requests, *engine.ended):
            if not is_mute(r):
                self._late += news_of(r, self._told.get(r.id))
            self._told[r.id] = r
        for r in engine.ended:
            self._told.pop(r.id)
        for step in engine.steps:
            for slot, request in step.admitted:
                known = state.requests.get(request)
                if not (known and is_mute(known)):
                    said = f"r{request} is admitted to slot {slot} in step {step.step}"
                    self._late.append((step.began, said))
        # A policy takes effect in the first step that was planned under it, or now
        policies = [(step.began, step.policy) for step in engine.steps]
        for moment, policy in (*policies, (engine.now, engine.policy)):
            if policy != self._policy:
                self._policy = policy
                self._late.append((moment, f"policy {policy}"))
        for fault in state.faults[self._faults :]:
            self._late.append((engine.now, fault.message))
        self._faults = len(state.faults)

    def obey(self, line: str) -> None:
        """Run a prompt or a command, and write the answer."""
        try:
            answer = self.session.obey(line)
        except ValueError as error:
            answer = str(error)
        page = self.session.menu.pages.get(split_command(line)[0])
        if answer:
            self.write(answer)
        elif page and not page.disturbs:  # an experiment's page is written at its end
            self._asked.append(page)
            self._write_pages()

    def _write_pages(self) -> None:
        """Write pages once the engine has run their commands, or say that there is none."""
        session = self.session
        while self._asked and session.handled:
            page = self._asked.pop(0)
            if session.state.view.engine or page.is_early:
                self.write_lines(page.in_log(session.state))
            else:
                self.write(session.client.asleep or "no engine yet")

    def write_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def news_of(r: RequestView, before: RequestView | None) -> Iterator[tuple[float, str]]:
    """Yield (time, words) for each event of a request since the view `before`."""
    ttft = r.metrics.ttft_s
    if before is None:
        client = client_of(r) and f" ({client_of(r)})"
        yield r.arrived, f"r{r.id}{client} waits: {shorten(prompt_of(r), 60)}"
    if ttft is not None and (before is None or before.metrics.ttft_s is None):
        yield r.arrived + ttft, f"r{r.id} has its first token after {span(ttft)}"
    if r.reason:
        figures = f"{count(r.metrics.output_tokens, 'token')}, TTFT {span(ttft)}"
        if r.metrics.tokens_per_s:
            figures += f", {number(r.metrics.tokens_per_s)} tokens/s"
        yield r.ended, f"r{r.id} ends ({r.reason}): {figures}: {' '.join(r.text.split())}"


NO_WORK = "standard input has no prompt; write one a line there, or give --prompts FILE or --script burst8"


def run_plain(
    session: Session, script: str, write: Callable[[str], None], stays: bool = False
) -> int:
    """Run the script, or the lines of standard input, until nothing is left to do.

    Without any input, print what to provide. `stays`: keep running, because other clients are
    watched. Return the exit code.
    """
    log = PlainLog(session, write)
    state = session.state
    lines = deque(
        as_command(*order) for order in orders_of(script, session.menu) if order[0] != "wait"
    )
    listening = not script
    rest = b""
    idle = not (script or session.client.posted or stays)  # no input so far
    if idle and listening and sys.stdin.isatty():
        log.write("type a prompt, or a command such as /burst 8 or /help; Ctrl-D ends")
    try:
        while True:
            time.sleep(0.05)
            log.refresh()
            if state.view.stage == "failed":
                print(f"nanobatch: {state.view.error}", file=sys.stderr)
                return 2
            if listening:
                rest, typed, listening = read_lines(rest)
                lines += typed
                idle = idle and not typed
            if idle and not listening:
                print(f"nanobatch: {NO_WORK}", file=sys.stderr)
                return 2
            # A line of a script waits until everything before it has finished
            while session.takes_prompts and lines and (session.settled or not script):
                log.refresh()
                line = lines.popleft()
                if line.split()[0] in ("/quit", "/exit"):
                    return 0
                log.obey(line)
            if session.takes_prompts and session.settled and not (lines or listening or stays):
                return 0
    finally:
        session.client.drain()
        log.refresh()
        log.flush()


def read_lines(rest: bytes) -> tuple[bytes, list[str], bool]:
    """Read standard input without blocking.

    Return the unfinished line, the complete lines, and whether more input may follow.
    """
    if not select.select([0], [], [], 0)[0]:
        return rest, [], True
    data = os.read(0, 65536)
    *lines, rest = (rest + (data or b"\n")).split(b"\n")  # the last line may lack its newline
    texts = [line.decode(errors="replace").strip() for line in lines]
    return rest, [text for text in texts if text], bool(data)
