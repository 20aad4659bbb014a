"""Commands, scripts, the plain log."""

from __future__ import annotations

import math
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle

from sched import POLICIES
from screen.ink import number, shorten, span
from screen.room import Ask, EngineRoom, RequestView, View
from screen.state import State, compare, race, verdict
from screen.timeline import Contest, useful_of


def whole(name: str, text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[+-]?\d{1,12}", text) or not least <= int(text) <= most:
        raise ValueError(f"{name} = {text!r}, but it must be a whole number from {least:,} to {most:,}")
    return int(text)


def real(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ValueError(f"{name} = {text!r}, but it must be a number from {least:g} to {most:,g}")
    return value


SETTABLE = {  # what /set takes: the field, and its limits
    "temperature": ("temperature", real, 0, 100),
    "max": ("max_tokens", whole, 1, 2**20),
    "seed": ("seed", whole, 0, 2**31 - 1),
    "burst": ("burst", whole, 1, 1000),
    "rate": ("rate", real, 0.01, 1000),
}


class Session:
    """An engine room and what is known of it. Keys, clicks, commands, scripts and the plain log all end up here."""

    def __init__(self, room: EngineRoom, state: State):
        self.room, self.state = room, state

    @property
    def heard(self) -> bool:
        """The view tells of everything that has been wished for."""
        return self.state.view.heard == self.room.posted

    @property
    def settled(self) -> bool:
        """Nothing is left to do."""
        return self.heard and not self.state.view.busy and not self.state.view.stepping

    def look(self) -> bool:
        """Take the newest view; True if there is something new."""
        view = self.room.view
        if view is self.state.view:
            return False
        self.state.absorb(view)
        return True

    def asks(self, count: int) -> list[Ask]:
        """So many of the prompts, again and again if need be. Each has a seed of its own, if there is one."""
        s, asks = self.state.settings, []
        for i, (prompt, longest) in zip(range(count), cycle(self.state.prompts)):
            seed = None if s.seed is None else s.seed + i
            asks.append(Ask(prompt, min(longest, s.max_tokens), s.temperature, seed))
        return asks

    def obey(self, line: str) -> str:
        """A line of text: a prompt, or a command. Answers with what to tell the user; ValueError if it cannot be."""
        if not line.startswith("/") or line.startswith("//"):
            s = self.state.settings
            self.room.fire([Ask(line.removeprefix("/"), s.max_tokens, s.temperature, s.seed)])
            return ""
        name, _, rest = line.removeprefix("/").partition(" ")
        command = getattr(self, f"_do_{name}", None)
        if command is None:
            known = " ".join(f"/{method[4:]}" for method in dir(self) if method.startswith("_do_"))
            raise ValueError(f"/{name} is no command; there are {known}")
        return command(rest.strip()) or ""

    def _do_burst(self, rest: str) -> str:
        count = whole("burst", rest or str(self.state.settings.burst), 1, 1000)
        self.room.fire(self.asks(count))
        return f"{count} prompts fired"

    def _do_race(self, rest: str) -> None:
        count = whole("race", rest or str(self.state.settings.burst), 1, 1000)
        seed = self.state.settings.seed or 0  # both legs roll the same dice
        self.state.contest = None
        self.room.race([ask._replace(seed=seed + i) for i, ask in enumerate(self.asks(count))])

    def _do_compare(self, rest: str) -> None:
        self.state.contest = compare(self.state)

    def _do_policy(self, rest: str) -> None:
        """The one that is named, or the next."""
        view = self.state.view
        now = POLICIES.index(view.switching_to or view.policy)
        policy = rest or POLICIES[(now + 1) % len(POLICIES)]
        if policy not in POLICIES:
            raise ValueError(f"policy = {policy!r}; choose one of {', '.join(POLICIES)}")
        self.room.switch(policy)

    def _do_load(self, rest: str) -> None:
        """So many requests a second; without a number: on or off."""
        off = rest == "off" or (not rest and self.state.view.load)
        rate = 0.0 if off else real("load", rest or str(self.state.settings.rate), 0, 1000)
        self.room.set_load(rate, self.asks(len(self.state.prompts)))

    def _do_cancel(self, rest: str) -> str:
        """All, or the one that is named, or that of the selected slot."""
        slot = self.state.selected
        owner = self.state.view.engine.slots[slot].request
        if rest == "all":
            owner = None
        elif rest:
            owner = whole("request", rest.removeprefix("r"), 0, 2**31)
        elif owner is None:
            return f"slot {slot} is free"
        self.room.cancel(owner)
        return "all requests are cancelled" if owner is None else f"r{owner} is cancelled"

    def _do_pause(self, rest: str) -> None:
        self.room.pause(True)

    def _do_resume(self, rest: str) -> None:
        self.state.cursor = None
        self.room.pause(False)

    def _do_step(self, rest: str) -> None:
        self.state.cursor = None
        self.room.step(whole("step", rest or "1", 1, 100_000))

    def _do_set(self, rest: str) -> str:
        changes = {}
        for pair in rest.split():
            name, _, value = pair.partition("=")
            if name not in SETTABLE:
                raise ValueError(f"{name!r} cannot be set; temperature, max, seed, burst and rate can")
            knob, check, least, most = SETTABLE[name]
            changes[knob] = None if pair in ("seed=", "seed=none") else check(name, value, least, most)
        self.state.settings = replace(self.state.settings, **changes)
        return f"set {rest}"


# What a script may say besides the commands, and the action that it stands for.
SCRIPTED = {
    "help": "sheet('help')",
    "requests": "open(0)",
    "view": "view",
    "zoom": "zoom",
    "light": "theme('textual-light')",
    "dark": "theme('textual-dark')",
}


def orders_of(script: str) -> list[tuple[str, str]]:
    """ "static burst24 step60" -> [("static", ""), ("burst", "24"), ("step", "60")]"""
    return re.findall(r"([a-z]+)[=:]?([0-9.]*)", script)


def as_command(word: str, rest: str) -> str:
    return f"/policy {word}" if word in POLICIES else f"/{word} {rest}"


class PlainLog:
    """The same run as a line for each event: for pipes, for logs, and for those who listen to their screen."""

    def __init__(self, session: Session, write: Callable[[str], None]):
        self.session, self.write = session, write
        self._told = View()  # what has been told
        self._step = self._legs = 0

    def look(self) -> None:
        if not self.session.look():
            return
        state, view, before = self.session.state, self.session.state.view, self._told
        self._told = view
        for stage in view.done[len(before.done) :]:
            self.write(f"loading: {stage}")
        known = {r.id: r for r in before.requests}
        news = [event for r in view.requests for event in self._news(known.get(r.id), r)]
        for step in state.steps:
            if step.step > self._step:
                news += [(step.began, f"r{r} is admitted to slot {s} in step {step.step}") for s, r in step.admitted]
        self._step = state.steps[-1].step if state.steps else 0
        for moment, line in sorted(news, key=lambda event: event[0]):
            self.write(f"{moment:8.3f} s  {line}")
        if view.stage == "ready" and (before.stage, before.policy) != ("ready", view.policy):
            self.write(f"{view.now:8.3f} s  policy {view.policy}")
        for fault in view.faults[len(before.faults) :]:
            self.write(f"{view.now:8.3f} s  {fault.message}")
        done = sum(leg.last_step is not None for leg in view.legs)
        if done > self._legs:
            self.tell(race(state), self._legs)
        self._legs = done

    def _news(self, before: RequestView | None, r: RequestView) -> Iterable[tuple[float, str]]:
        """What has happened to a request since: (when, what)."""
        if before is None:
            yield r.arrived, f"r{r.id} waits: {shorten(r.prompt, 60)}"
        if r.metrics.ttft_s is not None and (before is None or before.metrics.ttft_s is None):
            yield r.arrived + r.metrics.ttft_s, f"r{r.id} has its first token after {span(r.metrics.ttft_s)}"
        if r.reason and (before is None or before.reason is None):
            rate = f", {number(r.metrics.tokens_per_s)} tokens/s" if r.metrics.tokens_per_s else ""
            text = " ".join(r.text.split())
            end = f"{r.metrics.output_tokens} tokens, TTFT {span(r.metrics.ttft_s)}{rate}: {text}"
            yield r.ended, f"r{r.id} ends ({r.reason}): {end}"

    def obey(self, line: str) -> None:
        """A prompt, or a command."""
        try:
            answer = self.session.obey(line)
        except ValueError as error:
            answer = str(error)
        if answer:
            self.write(answer)
        elif line.startswith("/compare"):
            self.tell(self.session.state.contest)

    def tell(self, contest: Contest, first: int = 0) -> None:
        for run in contest.runs[first:]:
            if run.how != "running …":
                figures = (
                    f"TTFT mean {span(run.ttft_mean)}, p95 {span(run.ttft_p95)}, useful {useful_of(run.columns):.0f} %"
                )
                self.write(f"{run.policy}, {run.how}: makespan {span(run.makespan)}, {figures}")
        if words := verdict(contest.runs):
            self.write(words)


def run_plain(session: Session, script: str) -> int:
    """Prompts and commands come from standard input, a line each. At its end, with nothing left to do, we leave."""
    log = PlainLog(session, lambda line: print(line, flush=True))
    state = session.state
    orders = deque(as_command(*order) for order in orders_of(script) if order[0] not in (*SCRIPTED, "wait"))
    if not script and not session.room.posted:
        orders.append("/burst 8")
    listening, rest = not script, b""
    while True:
        time.sleep(0.02)
        log.look()
        if state.view.stage == "failed":
            print(f"nanobatch: {state.view.error}", file=sys.stderr)
            return 2
        if state.view.stage != "ready":
            continue
        if listening:
            rest, lines, listening = read_lines(rest)
            if lines:
                orders.clear()  # somebody knows what to ask: no need for the burst
            for line in lines:
                if line in ("/quit", "/exit"):
                    return 0
                log.obey(line)
        elif session.settled:
            log.look()
            if not orders:
                return 0
            log.obey(orders.popleft())


def read_lines(rest: bytes) -> tuple[bytes, list[str], bool]:
    """Lines that have come on standard input, without waiting for more; False when there will be none."""
    if not select.select([0], [], [], 0)[0]:
        return rest, [], True
    data = os.read(0, 65536)
    *lines, rest = (rest + data).split(b"\n")
    if not data and rest:
        lines, rest = [rest], b""
    texts = [line.decode(errors="replace").strip() for line in lines]
    return rest, [text for text in texts if text], bool(data)
