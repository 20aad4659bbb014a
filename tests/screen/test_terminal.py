"""The whole program in a real terminal: a pseudo-terminal, what a user types, and what such a
terminal would show."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from rich.cells import cell_len

from parts.device import mlx as device

ROOT = Path(__file__).parents[2]
# What the screen sends: cursor moves, colours, modes; then everything else that would be obeyed
# instead of shown.
MOVE = re.compile(r"\x1b\[(\d*);?(\d*)H")
OTHER = re.compile(
    r"\x1b\[[0-9;?<>=$!]*[a-zA-Z~]|\x1b[=>c78]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bP[^\x1b]*\x1b\\|\x1b."
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("terminal"), seed=1))


class Terminal:
    """A program in a terminal of so many characters, and the picture there."""

    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int] = (100, 30),
        environment: Mapping[str, str] | None = None,
        **how,
    ):
        self.width, self.height = size
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", self.height, self.width, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        env = (
            os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"} | (environment or {})
        )
        command = [sys.executable, str(ROOT / "tui.py"), *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, cwd="/", **how
        )
        self.raw = b""
        self.rows = [[" "] * self.width for _ in range(self.height)]
        self.x = self.y = self._drawn = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def read(self, wait: float) -> None:
        while select.select([self.master], [], [], wait)[0]:
            self.raw += os.read(self.master, 65536)
            wait = 0

    def text(self) -> str:
        self._draw()
        return "\n".join("".join(row).rstrip() for row in self.rows)

    def _draw(self) -> None:
        """Obey the moves, skip the colours, write the rest: all that Textual needs of a
        terminal."""
        data = self.raw.decode(errors="replace")
        end = max(data.rfind("\x1b", 0, len(data)), 0) if "\x1b" in data[-40:] else len(data)
        i = self._drawn
        while i < end:
            if match := MOVE.match(data, i):
                self.y, self.x = int(match[1] or 1) - 1, int(match[2] or 1) - 1
                i = match.end()
            elif match := OTHER.match(data, i):
                if match[0] == "\x1b[2J":
                    self.rows = [[" "] * self.width for _ in range(self.height)]
                i = match.end()
            else:
                self._put(data[i])
                i += 1
        self._drawn = i

    def _put(self, char: str) -> None:
        if char == "\n":
            self.y += 1
        elif char == "\r":
            self.x = 0
        elif char >= " " and self.y < self.height and self.x < self.width:
            self.rows[self.y][self.x] = char
            for extra in range(1, cell_len(char)):
                if self.x + extra < self.width:
                    self.rows[self.y][self.x + extra] = ""
            self.x += cell_len(char)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def sees(self, *parts: str) -> None:
        deadline = time.monotonic() + 120
        while not all(part in self.text() for part in parts):
            assert time.monotonic() < deadline, f"{parts} not seen:\n{self.text()}"
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}:\n{self.text()}"
            )
            self.read(0.05)

    def ends(self, code: int, saying: str = "") -> None:
        """It ends, and leaves the terminal as it was."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            self.read(0.02)
        self.read(0.05)
        assert self.process.returncode == code, self.raw[-2000:].decode(errors="replace")
        tail = self.raw.decode(errors="replace")
        entered, left = tail.rfind("\x1b[?1049h"), tail.rfind("\x1b[?1049l")
        assert entered < left, "the alternate screen is still on"
        assert tail.rfind("\x1b[?25l") < tail.rfind("\x1b[?25h"), "the cursor is hidden"
        for mode in (1000, 1003, 1006, 2004):
            assert tail.rfind(f"\x1b[?{mode}h") < tail.rfind(f"\x1b[?{mode}l"), (
                f"mode {mode} is still on"
            )
        assert termios.tcgetattr(self.slave)[:4] == self.before[:4], (
            "the terminal's settings have changed"
        )
        self.said = OTHER.sub("", tail[left:])
        table = (
            r" (policy|continuous|static|serial|On the engine's|interruptions,|\d+ requests? not) "
        )
        rest = [line for line in self.said.splitlines() if not re.match(table, line)]
        last = " ".join("".join(rest).split())
        assert saying in last if saying else not last, f"rubbish after the end: {tail[left:]!r}"


def test_a_user_types_a_prompt_fires_a_burst_switches_cancels_races_compares_and_quits(
    model, tmp_path
):
    trace = tmp_path / "trace.json"
    with Terminal("--model", model, "--max-len", "512", "--trace", str(trace)) as terminal:
        terminal.sees("Slots", "Timeline", "idle", "Tell me a story about a fox an")
        terminal.type("iquiz: xbrpc?q\r")  # the letters of keys
        terminal.sees("quiz: xbrpc?q")
        terminal.sees("1 ended")
        terminal.type("/set burst=12\r")
        terminal.sees("  set burst=12")  # what the screen says to it, and not what was typed
        terminal.type("b")
        terminal.sees("13 ended", "idle")
        terminal.type("p")
        terminal.sees("idle  static")
        terminal.type(" b")  # paused, so that there are requests to cancel
        terminal.sees("queue 12", "paused")
        terminal.type("/step 60\r")
        terminal.sees("paused", "space Go on", "blocked    ")  # in a slot, not in the legend
        terminal.type("x")
        terminal.sees("cancelled")
        terminal.type("X ")
        terminal.sees("25 ended", "idle")
        terminal.type("r")
        terminal.sees("Race", "static, measured", "continuous, measured", "makespan", " takes ")
        terminal.type("\x1b")
        terminal.sees("49 ended", "idle  static", "Slots")
        terminal.type("c")
        terminal.sees("Compare", "static, simulated", "continuous, simulated", "What really")
        terminal.type("q")
        terminal.ends(0)
        titles, *totals = [line.split() for line in terminal.said.strip().splitlines()]
        assert titles[:2] == ["policy", "requests"] and len(totals) >= 4, (
            "what ran stays to be read after the end"
        )
        assert totals[0][:2] == ["continuous", "12"] and totals[1][:2] == ["static", "12"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {
        "r2 decode",
        "blocked",
        "plan",
        "build",
        "device",
        "wait",
        "commit",
        "in line",
        "tokens/s",
    } <= {event["name"] for event in events}


def test_the_first_frame_comes_before_mlx_and_q_leaves_even_then(model, tmp_path):
    """Here MLX can never be imported."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "mlx" / "__init__.py").write_text("")
    with Terminal("--model", model, environment={"PYTHONPATH": str(tmp_path)}) as terminal:
        terminal.sees("watch an LLM serving engine work", "starting MLX")
        terminal.type("q")
        terminal.ends(0)


@pytest.mark.skipif(not device.blas.library, reason=f"nothing is compiled here: {device.blas}")
@pytest.mark.parametrize("serves", [(), ("--serve", "0")], ids=["screen", "screen of a server"])
def test_a_first_start_shows_among_its_stages_that_it_compiles(model, tmp_path, serves):
    """Printed, the line would stand in the middle of the picture, and two seconds would pass
    without a word."""
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    with Terminal("--model", model, *serves, size=(80, 24), environment=cache) as terminal:
        terminal.sees("✓ starting MLX", "… compiling rows.c", "once, in a few seconds", "q quits")
        terminal.sees("Slots", "idle")
        assert "compiling" not in terminal.text() and list(tmp_path.glob("nanobatch/rows-*.so"))
        terminal.type("q")
        terminal.ends(0)
    command = [
        sys.executable,
        str(ROOT / "tui.py"),
        "--model",
        model,
        "--max-len",
        "128",
        "--plain",
    ]
    done = subprocess.run(
        command,
        input=b"hello\n",
        env=os.environ | cache,
        capture_output=True,
        timeout=120,
        cwd="/",
        check=True,
    )
    stages = [line for line in done.stdout.decode().splitlines() if line.startswith("loading: ")]
    assert (
        stages[0] == "loading: starting MLX"
        and stages[-1] == f"loading: warming up with {device.blas}"
    )
    assert not any("compiling" in line for line in stages), "it was compiled a second time"


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)]
)
def test_a_signal_restores_the_terminal(model, number, code):
    with Terminal("--model", model, "--script", "burst24") as terminal:
        terminal.sees("Slots")
        terminal.process.send_signal(number)
        terminal.ends(code)


def test_ctrl_z_gives_the_terminal_back_and_the_screen_comes_again(model):
    """Ctrl-Z did nothing. The engine's clock stands still meanwhile: a person may be away for an
    hour."""

    def state() -> str:
        return Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(") ")[2][0]

    with Terminal("--model", model, process_group=0) as terminal:
        terminal.sees("Slots", "idle")
        terminal.type("\x1a")
        deadline = time.monotonic() + 60
        while state() != "T":
            assert time.monotonic() < deadline, terminal.text()
            terminal.read(0.05)
        assert terminal.raw.rfind(b"\x1b[?1049h") < terminal.raw.rfind(b"\x1b[?1049l")
        assert termios.tcgetattr(terminal.slave)[:4] == terminal.before[:4]
        seen = len(terminal.raw)
        terminal.process.send_signal(signal.SIGCONT)
        while b"Slots" not in terminal.raw[seen:]:
            assert time.monotonic() < deadline, terminal.text()
            terminal.read(0.05)
        terminal.type("q")
        terminal.ends(0)


def test_a_broken_model_says_what_helps_and_the_screen_can_be_left(tmp_path):
    folder = make_checkpoint(tmp_path / "broken", seed=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with Terminal("--model", str(folder), size=(80, 24)) as terminal:
        terminal.sees("is cut off", "q quits")
        terminal.type("\x03")
        terminal.ends(2, saying="is cut off")


def test_without_a_terminal_the_same_run_is_a_plain_log(model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first prompt\nsecond prompt\n")
    command = [
        sys.executable,
        str(ROOT / "tui.py"),
        "--model",
        model,
        "--max-len",
        "128",
        "--slots",
        "2",
    ]
    done = subprocess.run(
        [*command, "--prompts", str(prompts)], input=b"", capture_output=True, timeout=120, cwd="/"
    )
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr
    assert any("r1 waits: first prompt" in line for line in lines)
    assert any("r2 is admitted to slot 1" in line for line in lines)
    assert sum(" ends (" in line for line in lines) == 2
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(lines))
    typed = b"hello\n/set max=5\nyou\n/race 4\n"
    done = subprocess.run([*command], input=typed, capture_output=True, timeout=120, cwd="/")
    text = done.stdout.decode()
    assert (
        done.returncode == 0 and "r1 waits: hello" in text and "r2 ends (length): 5 tokens" in text
    )
    assert "static, measured: steps " in text and "continuous, measured: steps " in text


@pytest.mark.parametrize("given", ["< /dev/null", "<&-"])
def test_without_a_terminal_and_without_a_prompt_one_line_says_what_to_give(model, given):
    """Eight prompts of its own were answered, on any model, however slow; a closed input was a
    traceback."""
    command = f"exec {sys.executable} {ROOT / 'tui.py'} --plain --model {model} {given}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=120, cwd="/")
    assert done.returncode == 2 and b" waits: " not in done.stdout
    (line,) = done.stderr.decode().splitlines()
    assert (
        "standard input has no prompt" in line
        and "--prompts FILE" in line
        and "--script burst8" in line
    )


def test_a_plain_log_on_a_terminal_says_what_can_be_typed(model):
    """It said nothing, and seemed to hang. What is typed before the model is there waits for it."""
    with Terminal("--model", model, "--max-len", "128", "--plain", size=(100, 40)) as terminal:
        terminal.sees("type a prompt, or a command such as /burst 8")
        terminal.type("/set max=3\nhello\n")
        terminal.sees("r1 waits: hello", "r1 ends (length): 3 tokens")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0


def test_a_script_draws_its_picture_on_no_terminal(model, tmp_path):
    """To wait while paused took for ever: nothing runs then that could end."""
    picture = tmp_path / "picture.svg"
    command = [
        sys.executable,
        str(ROOT / "tui.py"),
        "--model",
        model,
        "--script",
        "light static pause burst24 step60 wait",
    ]
    options = ["--screenshot", str(picture), "--size", "120x40"]
    done = subprocess.run(
        [*command, *options], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    text = re.sub("<[^>]*>", "", picture.read_text()).replace("&#160;", " ").replace("\xa0", " ")
    assert "step 60" in text and "paused" in text and "blocked" in text


def test_the_command_line_of_the_engine_shows_no_escape_sequence_either(model):
    evil = "\x1b]0;title\x07 \x9b31m red \u202e"
    command = [
        sys.executable,
        str(ROOT / "ask.py"),
        "--model",
        model,
        "--prompt",
        evil,
        "--max-tokens",
        "200",
    ]
    done = subprocess.run([*command, "--ignore-eos"], capture_output=True, timeout=120, cwd="/")
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0 and "red" in said and len(said) > 200
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)


def test_behind_textual_serve_the_screen_is_drawn_through_pipes_and_leaves_with_its_page(model):
    """It wrote the plain log there, since pipes are no terminal; and totals behind the end are no
    packets."""
    env = os.environ | {
        "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver",
        "COLUMNS": "100",
        "ROWS": "30",
    }
    command = [
        sys.executable,
        str(ROOT / "tui.py"),
        "--model",
        model,
        "--max-len",
        "128",
        "--script",
        "burst2",
    ]
    quit_ = b'{"type": "quit"}'
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/"
    ) as process:
        late = threading.Timer(60, process.kill)
        late.start()
        assert b"__GANGLION__\n" in iter(process.stdout.readline, b""), (
            "what textual-serve waits for"
        )
        seen, asked = "", False
        for head in iter(lambda: process.stdout.read(5), b""):
            assert head[:1] in (b"D", b"M"), head
            seen += process.stdout.read(int.from_bytes(head[1:], "big")).decode()
            if "2 ended" in OTHER.sub("", seen) and not asked:
                asked = True  # the page has been closed
                process.stdin.write(b"M" + len(quit_).to_bytes(4, "big") + quit_)
                process.stdin.flush()
        late.cancel()
    assert asked and "Slots" in seen and process.returncode == 0
