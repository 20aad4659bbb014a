"""A chat in the terminal: a question, the answer as it is generated, and the next question.

    >>> My name is Ada.
    Hello, Ada.
        [read 23 tokens; first token after 31 ms; 5 tokens, 40 tokens/s]
    >>> What is my name?
    Ada.
        [read 12 of 47 tokens; 35 were still in the slot; first token after 19 ms; 3 tokens, 41 tokens/s]

Each question is sent with the whole conversation, which grows until it no longer fits in a slot. It is
never truncated silently: the dialogue says how many tokens are left, and the user chooses what to forget.
If an answer is stopped, the part that has arrived stays in the conversation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.atomic_write import write_whole
from base.status_line import StatusLine
from base.untrusted_files import read_some
from base.validation import one_line, printable, shown
from cli.chat_model import SETTABLE, ChatModel, EngineModel, Outgrown
from cli.options import say
from cli.text_output import WordWrap
from text.tool_parser import ParsedPart

if TYPE_CHECKING:
    from engine.snapshot import Metrics
    from nanobatch import Engine
    from sampling_params import SamplingParams

HELP = """/new            begin another conversation (the system message stays)
/system TEXT    tell the model who it is; without a text, forget it
/retry          ask the last question again
/drop           forget the oldest question and its answer
/set            show how answers are sampled; /set temperature=0.7 seed=1 changes it
/save FILE      write the conversation; /load FILE continues one
@FILE           in a question: a text file to include
\"\"\"             begins and ends a question of several lines
Ctrl-C          stops an answer; Ctrl-D ends"""
LARGEST = 10_000_000  # maximum length of a saved conversation in characters
LARGEST_FILE = 2_000_000  # maximum length of an attached file in characters
NAMED = re.compile(r"(?<!\S)@(\S+)")  # @FILE in a question
FEW = 0.25  # fraction of a slot below which the dialogue says how many tokens are left


class Conversation:
    """The conversation so far, as messages in OpenAI's format."""

    def __init__(self) -> None:
        self.system = ""
        self.turns: list[dict[str, str]] = []  # user and assistant alternate

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        last = [] if question is None else [{"role": "user", "content": question}]
        return first + self.turns + last

    def add(self, question: str, answer: str, thought: str = "") -> None:
        reply = {"role": "assistant", "content": answer}
        if thought:  # chat templates expect reasoning in this field
            reply["reasoning_content"] = thought
        self.turns += [{"role": "user", "content": question}, reply]

    def pop_oldest(self) -> str:
        """Remove the first question with its answer. Return the question."""
        if not self.turns:
            raise ValueError("nothing was said yet, so there is nothing to forget")
        oldest, self.turns = self.turns[:2], self.turns[2:]
        return oldest[0]["content"]

    def pop_newest(self) -> str:
        """Remove the last question with its answer. Return the question."""
        if not self.turns:
            raise ValueError("nothing was asked yet, so there is nothing to ask again")
        newest, self.turns = self.turns[-2:], self.turns[:-2]
        return newest[0]["content"]

    def save(self, path: str) -> None:
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2)
        try:
            write_whole(path, text + "\n")
        except OSError as error:
            raise ValueError(f"{shown(path)} cannot be written ({one_line(error)})") from None

    @classmethod
    def load(cls, path: str) -> Conversation:
        """Load a conversation from a file. Raise ValueError if the file contains no conversation."""
        found = cls()
        try:
            messages = json.loads(read_some(path, LARGEST))["messages"]
            if messages and messages[0]["role"] == "system":
                found.system = messages.pop(0)["content"]
            roles = [message["role"] for message in messages]
            if roles != ["user", "assistant"] * (len(roles) // 2):
                raise ValueError(
                    "user and assistant must alternate, and the last message is the assistant's"
                )
            texts = [found.system]
            for message in messages:
                texts += [message["content"], *message.values()]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("each message must be a string")
            found.turns = [*messages]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{shown(path)} is not a conversation ({one_line(error)})") from None
        return found


class Dialogue:
    """The loop that reads questions and writes answers.

    `read` prompts for a line and raises EOFError at the end of input; `write` receives pieces of text.
    `width` returns the terminal's width in columns; None turns off word wrap.
    """

    def __init__(
        self,
        model: ChatModel,
        read: Callable[[str], str] = input,
        write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
        width: Callable[[], int | None] = lambda: None,
    ):
        self.model = model
        self.changes: dict[str, Any] = {}  # settings changed by /set
        self.read = read
        self.write = write
        self.width = width
        self.status = StatusLine()
        self.talk = Conversation()
        self.waiting = ""  # a question that did not fit in the slot

    def run(self, questions: Sequence[str] = ()) -> int:
        """Answer these questions, then those that the user types, until the end of input."""
        first = list(questions)
        while True:
            try:
                self.handle_line(first.pop(0) if first else self.next_line())
            except KeyboardInterrupt:
                self.say("\n(Ctrl-D ends)")
            except EOFError:
                self.write("\n")
                return 0
            except ValueError as error:
                self.say(f"nanobatch: {one_line(error)}")

    def next_line(self) -> str:
        line = self.read(">>> ")
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        try:
            while not lines[-1].endswith('"""'):
                lines.append(self.read("... "))
        except EOFError:
            why = 'the input ended before the closing """, so this question is not asked'
            raise ValueError(why) from None
        return "\n".join(lines)[:-3].strip("\n")

    def handle_line(self, line: str) -> None:
        command, _, rest = line.strip().partition(" ")
        if command.startswith("/"):
            self.obey(command, rest.strip())
        elif line.strip():
            self.ask(self.attach(line))

    def attach(self, question: str) -> str:
        """Return a question with the text files that it names as @FILE. Other @words stay unchanged."""
        files = {}
        for word in NAMED.findall(question):
            path = os.path.expanduser(word)
            if not os.path.isfile(path):
                path = path.rstrip(".,;:!?)")  # punctuation at the end of a sentence
            if os.path.isfile(path):
                files[path] = read_attachment(path)
        for name, text in files.items():
            self.say(f"with {name}, {self.model.size_of(text)}")
        return with_files(question, files)

    def obey(self, command: str, rest: str) -> None:
        if command == "/help":
            self.say(HELP)
        elif command == "/new":
            self.talk.turns = []
            self.waiting = ""
            self.say("a new conversation")
        elif command == "/system":
            self.talk.system = rest
            self.say("from the next question on")
        elif command == "/retry":
            self.retry()
        elif command == "/set":
            self.configure(rest)
        elif command == "/drop":
            self.say(f"forgotten: {shown(self.talk.pop_oldest())}")
            if self.waiting:
                self.ask(self.waiting)
        elif command in ("/save", "/load") and not rest:
            raise ValueError(f"{command} needs a file: {command} FILE")
        elif command == "/save":
            self.talk.save(rest)
            self.say(f"{rest} is written")
        elif command == "/load":
            self.talk = Conversation.load(rest)
            self.waiting = ""
            self.say(f"continues after {len(self.talk.turns) // 2} questions")
        elif command in ("/bye", "/exit", "/quit"):
            raise EOFError
        else:
            raise ValueError(f"{shown(command)} is not a command; /help lists them")

    def configure(self, rest: str) -> None:
        """Change the sampling settings and show them."""
        changes = {}
        for word in rest.split():
            name, _, value = word.partition("=")
            if name not in SETTABLE or not value:
                known = ", ".join(SETTABLE)
                raise ValueError(f"/set {shown(word)}: give NAME=NUMBER; the names are {known}")
            changes[name] = number(value)
        values = self.model.settings(self.changes | changes)
        self.changes |= changes
        words = [f"{name}={'none' if each is None else each}" for name, each in values.items()]
        self.say(" ".join(words))

    def retry(self) -> None:
        """Ask the last question again. If that fails or is interrupted, keep the previous answer."""
        turns = list(self.talk.turns)
        question = self.waiting or self.talk.pop_newest()
        try:
            self.ask(question)
        except BaseException:
            self.talk.turns = turns
            raise

    def ask(self, question: str) -> None:
        try:
            reply = self.model.ask(self.talk.messages(question), self.changes)
        except Outgrown:
            self.waiting = question
            raise
        self.waiting = ""
        thought = answer = ""
        width = self.width()
        wrap = WordWrap(width) if width else None
        try:
            reply.wait_for_text(self.status.show)
            for part, said in spoken(reply):
                if part.kind == "reasoning":
                    thought += part.text
                else:
                    answer += part.text
                self.write(wrap.push(said) if wrap else said)
        except KeyboardInterrupt:
            reply.cancel()
        self.write(wrap.flush() if wrap else "")
        result = reply.result()
        if result.error:
            raise ValueError(result.error)
        self.talk.add(question, answer, thought)
        said = figures(result.metrics, result.finish_reason)
        length = self.model.length
        left = length - result.metrics.prompt_tokens - result.metrics.output_tokens
        self.say(f"\n    [{said}{room_left(left, length)}]")

    def say(self, line: str) -> None:
        width = self.width()
        wrap = WordWrap(width) if width else None
        self.write(f"{wrap.push(line) + wrap.flush() if wrap else line}\n")


def read_attachment(path: str) -> str:
    try:
        text = read_some(path, LARGEST_FILE)
        if "\0" in text:
            raise ValueError("it is not text")
    except (OSError, ValueError) as error:
        raise ValueError(f"@{shown(path)[1:-1]} cannot be read ({one_line(error)})") from None
    return text


def with_files(question: str, files: Mapping[str, str]) -> str:
    """Return the text that the model receives: the files, then the question.

    Each file is in a code fence that is longer than any fence inside it, as in web/talks.js.
    """
    parts = []
    for name, text in files.items():
        fence = "`" * (1 + max([2, *map(len, re.findall("`{3,}", text))]))
        parts.append(f"{name}:\n{fence}\n{text}\n{fence}")
    return "\n\n".join([*parts, question])


def number(text: str) -> int | float | str | None:
    """Parse a value: a number, or "none". Any other text stays a string, which `SamplingParams` refuses."""
    if text == "none":
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def spoken(parts: Iterable[ParsedPart], is_dim: bool = True) -> Iterator[tuple[ParsedPart, str]]:
    """Yield the parts of an answer as they arrive, each with its terminal text. `is_dim`: dim the reasoning."""
    before = ""
    for part in parts:
        ends_thought = before == "reasoning" != part.kind
        text = on_terminal(part) if is_dim else printable(part.text)
        yield part, "\n" * ends_thought + text
        before = part.kind


def on_terminal(part: ParsedPart) -> str:
    text = printable(part.text)
    return f"\x1b[2m{text}\x1b[22m" if part.kind == "reasoning" else text


def room_left(left: int, length: int) -> str:
    """Return a note about the tokens left in a slot; empty unless there are few, or if `length` is unknown (0)."""
    few = length and left < FEW * length
    return f"; {left:,} tokens are left: /drop and /new make room" if few else ""


def figures(m: Metrics, reason: str | None, where: str = "the slot") -> str:
    """Describe the cost of a turn. `where`: the slot that held the conversation's cached tokens."""
    read = f"read {m.prompt_tokens - m.cached_tokens:,}"
    if not m.prompt_tokens:  # a server does not report the prompt tokens of a stopped answer
        read = "stopped"
    elif m.cached_tokens:
        where = "on disk" if m.cached_from == "disk" else f"still in {where}"
        read += f" of {m.prompt_tokens:,} tokens; {m.cached_tokens:,} were {where}"
    else:
        read += " tokens"
    first = "" if m.ttft_s is None else f"; first token after {m.ttft_s * 1000:.0f} ms"
    rate = "" if m.tokens_per_s is None else f", {m.tokens_per_s:.0f} tokens/s"
    ended = {"stop": "", "length": "; cut off at the limit", "cancelled": "; stopped"}
    return f"{read}{first}; {m.output_tokens:,} tokens{rate}{ended.get(reason, '')}"


# --- the input line -----------------------------------------------------------------------------

KEPT = 1000  # maximum number of questions in the history
NEWLINE = "␊"  # stands for a line break inside a question in the history


def history_file() -> Path | None:
    """Return the history file, or None with NANOBATCH_HISTORY=off."""
    if os.environ.get("NANOBATCH_HISTORY") == "off":
        return None
    return state_folder() / "history"


def state_folder() -> Path:
    """Return the folder for per-user state that persists between runs."""
    place = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(place) / "nanobatch"


class History:
    """Questions from this and earlier runs, the newest last. Only the user may read the file. Each question
    except commands is appended to it immediately."""

    def __init__(self, file: Path | None = None):
        self.file = file
        self.questions: list[str] = []
        with suppress(OSError):
            if file:
                # After a power failure the file may contain zero bytes, which `readline` refuses
                text = file.read_text(encoding="utf-8", errors="replace").replace("\0", "")
                lines = text.split("\n")
                self.questions = [line.replace(NEWLINE, "\n") for line in lines if line]
        if len(self.questions) > KEPT:
            del self.questions[:-KEPT]
            self._write(os.O_TRUNC, self.questions)

    def add(self, question: str) -> None:
        if question.strip() and question not in self.questions[-1:]:
            self.questions.append(question)
            if not question.startswith("/"):  # other programs share the file but not the commands
                self._write(os.O_APPEND, [question])

    def _write(self, how: int, questions: Sequence[str]) -> None:
        lines = "".join(question.replace("\n", NEWLINE) + "\n" for question in questions)
        with suppress(OSError):  # continue without a history file
            if self.file:
                self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                handle = os.open(self.file, os.O_CREAT | os.O_WRONLY | how, 0o600)
                with open(handle, "wb") as file:
                    file.write(lines.encode(errors="replace"))


def keep(history: History) -> Callable[[str], str]:
    """Return a function like `input` that offers the history on the Up and Down keys and extends it."""
    with suppress(ImportError):  # some builds of Python have no readline
        import readline

        for question in history.questions:
            readline.add_history(question.replace("\n", NEWLINE))

    def read_line(asked: str) -> str:
        line = input(asked).replace(NEWLINE, "\n")
        history.add(line)
        return line

    return read_line


def chat_in_terminal(engine: Engine, sampling: SamplingParams, questions: Sequence[str]) -> int:
    """Chat with the user in this terminal."""
    if not engine.text.has_template:
        raise ValueError("this model has no chat template, so it cannot chat: give a PROMPT")
    with engine.serving():
        return chat(EngineModel(engine, sampling), engine.summary, questions)


def chat(model: ChatModel, summary: str, questions: Sequence[str]) -> int:
    say(summary)
    say("/help says more")
    history = History(history_file() if sys.stdin.isatty() else None)
    return Dialogue(model, keep(history), width=columns).run(questions)


def columns() -> int | None:
    """Return the width of the terminal; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
