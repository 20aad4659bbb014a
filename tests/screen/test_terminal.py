"""The whole program in a pseudo-terminal: what a user types, and what the terminal would show."""

import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoints import make_checkpoint
from processes import run, state_of
from servers import COMPLETIONS, Line, free_ports
from terminals import OTHER, ROOT, Terminal


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("terminal"), seed=1))


def test_a_session_of_a_user(model, tmp_path):
    file = tmp_path / "run.json"
    with Terminal("--model", model, "--max-len", "512", "--record", str(file)) as terminal:
        terminal.sees("Slots", "Timeline", "idle", "Tell me a story about a fox an")
        terminal.type("iquiz: xbrpc?q\r")  # these letters are keys, too
        terminal.sees("quiz: xbrpc?q")
        terminal.sees("1 ended")
        terminal.type("\x1b")  # the box stays open
        terminal.sees("i Prompt")
        terminal.type("/set burst=12\r")
        terminal.sees("  set burst=12")  # the screen's reply, not the typed text
        terminal.type("b")
        terminal.sees("13 ended", "idle")
        terminal.type("p")
        terminal.sees("idle  static")
        terminal.type(" b")  # pause first, so that there are requests to cancel
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
        terminal.type("q")
        terminal.ends(0, "holds 2 runs (static and continuous)")
        titles, *totals = [line.split() for line in terminal.said.strip().splitlines()]
        assert titles[:2] == ["policy", "requests"] and len(totals) >= 4, (
            "what ran stays to be read after the end"
        )
        assert totals[0][:2] == ["continuous", "12"] and totals[1][:2] == ["static", "12"]
    assert [run["policy"] for run in json.loads(file.read_text())["runs"]] == [
        "static",
        "continuous",
    ]


def test_the_first_frame_comes_before_mlx(model, tmp_path):
    """The screen appears although importing MLX never finishes here."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "mlx" / "__init__.py").write_text("")
    with Terminal("--model", model, environment={"PYTHONPATH": str(tmp_path)}) as terminal:
        terminal.sees("watch an LLM serving engine work", "starting MLX")
        terminal.type("q")
        terminal.ends(0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_signal_restores_the_terminal(model, number, code):
    with Terminal("--model", model, "--script", "burst24") as terminal:
        terminal.sees("Slots")
        terminal.process.send_signal(number)
        terminal.ends(code)


def ask(port: int) -> bytes:
    """Return everything that a client receives for a request of 60 tokens."""
    body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
    return Line("127.0.0.1", port).post(COMPLETIONS, body).everything()


CRASH = """
def spoil(self):
    import screen.widgets
    screen.widgets.Pane.render_line = lambda *_: 1 / 0
    self.screen.query_one("#slots").refresh()
tui.Screen.action_zoom = spoil"""


@pytest.mark.parametrize("crashes", [True, False])
def test_a_lost_screen_lets_clients_finish(model, crashes):
    """If the screen crashes or its terminal is closed, clients get their answers, and the engine's pause ends."""
    (port,) = free_ports(1)
    options = ("--model", model, "--max-len", "128", "--serve", str(port))
    spoiled = CRASH if crashes else ""
    with Terminal(*options, spoiled=spoiled, preexec_fn=lambda: os.login_tty(0)) as terminal:
        terminal.sees("Slots", "idle")
        terminal.type(" ")
        terminal.sees("paused")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, port)
            terminal.sees("queue 1")
            if crashes:
                terminal.type("z")
                terminal.ends(1, saying="ZeroDivisionError")
            else:
                terminal.vanish()
            assert b"[DONE]" in answer.result()
        assert terminal.process.wait(60) in (1, 129)  # a failed read, or SIGHUP


def test_ctrl_z_suspends(model):
    """Regression: Ctrl-Z did nothing. It restores the terminal, and SIGCONT draws the screen again."""

    def state() -> str:
        return state_of(terminal.process.pid)

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


def test_without_a_terminal_the_same_run_is_a_plain_log(model):
    command = [ROOT / "tui.py", "--model", model, "--max-len", "128", "--slots", "2"]
    done = run(*command, input="hello\n/set max=5\nyou\n/race 4\n", cwd="/")
    text = done.stdout
    assert done.returncode == 0, done.stderr
    assert "r1 waits: hello" in text and "r2 ends (length): 5 tokens" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert "\n static, measured " in text and "\n continuous, measured " in text


def test_no_terminal_and_no_prompt_is_one_line(model):
    """Regression: the program answered eight prompts of its own, on any model, however slow."""
    command = [sys.executable, str(ROOT / "tui.py"), "--plain", "--model", model]
    nothing = subprocess.DEVNULL
    done = subprocess.run(command, stdin=nothing, capture_output=True, timeout=120, cwd="/")
    assert done.returncode == 2 and b" waits: " not in done.stdout
    (line,) = done.stderr.decode().splitlines()
    assert (
        "standard input has no prompt" in line
        and "--prompts FILE" in line
        and "--script burst8" in line
    )


def test_a_log_on_a_terminal_says_what_to_type(model):
    """Regression: the log printed nothing and seemed to hang. Text typed before the model is loaded waits
    for it."""
    with Terminal("--model", model, "--max-len", "128", "--plain", size=(100, 40)) as terminal:
        terminal.sees("type a prompt, or a command such as /burst 8")
        terminal.type("/set max=3\nhello\n")
        terminal.sees("r1 waits: hello", "r1 ends (length): 3 tokens")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0


def test_a_script_draws_its_picture_on_no_terminal(model, tmp_path):
    """Regression: `wait` in a script never finished while the engine was paused."""
    picture = tmp_path / "picture.svg"
    script = "light static pause burst24 step60 wait"
    options = ["--screenshot", picture, "--size", "120x40"]
    done = run(ROOT / "tui.py", "--model", model, "--script", script, *options, cwd="/")
    assert done.returncode == 0, done.stderr
    text = re.sub("<[^>]*>", "", picture.read_text()).replace("&#160;", " ").replace("\xa0", " ")
    assert "step 60" in text and "paused" in text and "blocked" in text


def test_a_planted_fault_is_not_printed_at_the_end(model, tmp_path):
    options = ["--script", "break=step wait", "--screenshot", tmp_path / "picture.svg"]
    done = run(ROOT / "tui.py", "--model", model, *options, cwd="/")
    assert done.returncode == 0 and "Traceback" not in done.stderr + done.stdout, done.stderr


def test_ask_prints_no_escape_sequence(model):
    evil = "\x1b]0;title\x07 \x9b31m red \u202e"
    options = ["--max-tokens", "200", "--ignore-eos"]
    done = run(ROOT / "ask.py", "--model", model, "--prompt", evil, *options, cwd="/")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "red" in said and len(said) > 200
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)


def test_textual_serve(model):
    """Regression: the program wrote the plain log, since pipes are not a terminal. It must write nothing but
    packets, not even totals at the end."""
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
                asked = True  # send what textual-serve sends when the page is closed
                process.stdin.write(b"M" + len(quit_).to_bytes(4, "big") + quit_)
                process.stdin.flush()
        late.cancel()
    assert asked and "Slots" in seen and process.returncode == 0
