"""The command line of the screen, and the plain log."""

import re
from types import SimpleNamespace

import pytest
from screen_stage import Stage

import tui
from engine.server_snapshot import RequestRecord, ServerView
from screen import commands
from screen.draw.style import clean
from tui import MENU


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slots", "0"],
        ["--slots", "many"],
        ["--max-len", "-3"],
        ["--policy", "fastest"],
        ["--seed", "x"],
        ["--model", "/nowhere/at/all"],
        ["--model", ""],
        ["--size", "80"],
        ["--nonsense"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_gets_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        tui.parse_arguments(arguments)
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    assert said.err.startswith("nanobatch: ") and said.err.count("\n") == 1


def test_a_script_may_be_written_in_capitals(capsys):
    """Regression: `--script Burst24` reported that 'urst' is not a command."""
    assert tui.parse_arguments(["--script", "Static Burst24"]).script == "Static Burst24"
    assert commands.orders_of("Static Burst24", MENU) == [("static", ""), ("burst", "24")]
    with pytest.raises(SystemExit):
        tui.parse_arguments(["--script", "Hurst24"])
    assert "'hurst24' is not a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("burst-3", "burst = '-3', but it must be a whole number from 1 to 1,000"),
        ("burst5x", "burst = '5x'"),
        ("burst0", "burst = '0'"),
        ("burst 5", "'5' is not a command"),
        ("set max=5 burst2", "'set' is not a command"),
        ("static4", "'static4' is not a command"),
        ("bogus", "'bogus' is not a command; there are continuous static"),
    ],
)
def test_a_wrong_script_is_refused_before_loading(script, words, capsys):
    """Regression: `burst-3` and `burst 5` fired 24 prompts, and an unknown word did not list the valid
    ones."""
    with pytest.raises(SystemExit) as left:
        tui.parse_arguments(["--script", script, "--screenshot", "/dev/null/x.svg"])
    said = capsys.readouterr().err
    assert (
        left.value.code == 2
        and said.startswith(f"nanobatch: --script: {words}")
        and said.count("\n") == 1
    )


@pytest.mark.parametrize(
    "script", ["pause burst2", "static burst24 step60", "load5", "slow4", "view", "cancel"]
)
def test_a_plain_log_refuses_what_needs_a_screen(script, capsys):
    """Regression: `pause burst2` hung silently, and a step or a load was ignored."""
    assert commands.orders_of(script, MENU)
    with pytest.raises(SystemExit) as left:
        tui.parse_arguments(["--plain", "--script", script])
    assert (
        left.value.code == 2
        and "is not a command without a screen; there are " in capsys.readouterr().err
    )
    assert tui.parse_arguments(["--plain", "--script", "static burst8 compare wait race12"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--prompts", "/no/p.txt"],
            "--prompts '/no/p.txt': No such file or directory; name a text file",
        ),
        (
            ["--record", "/no/t.json"],
            "--record '/no/t.json': No such file or directory; name a file in a folder",
        ),
        (
            ["--screenshot", "/no/s.svg"],
            "--screenshot '/no/s.svg': No such file or directory; name a file",
        ),
        (
            ["--screenshot", "foo.png"],
            "--screenshot 'foo.png' will be an SVG; give a name that ends in .svg",
        ),
    ],
    ids=range(4),
)
def test_an_unusable_file_is_named_with_its_option(arguments, words, capsys):
    """Regression: the message was "[Errno 2] No such file or directory", and foo.png became an SVG."""
    with pytest.raises(SystemExit):
        tui.parse_arguments(arguments)
    assert capsys.readouterr().err.startswith(f"nanobatch: {words}")


# Control sequences, a change of writing direction, invisible characters, and half a surrogate pair.
HOSTILE = "\x1b]0;title\x07\x9b2J\u202e\u061c\ufff9\u115f\u3164\U000e0100\U000e0041\ud83e\r\n"


def is_plain(text: str) -> bool:
    """True if no character is invisible, controls the terminal, or ends a line."""
    return clean(text) == text and "\n" not in text


def test_a_plain_log_has_no_control_characters():
    """Regression: a request's path was percent-decoded, and logged with its control characters."""
    stage = Stage(slots=2).load()
    call = RequestRecord(1, 0.0, "127.0.0.1", f"GET /{HOSTILE}", status=404, message=HOSTILE)
    ended = [(call,)]
    stage.client.server = SimpleNamespace(
        view=lambda since: ServerView("", False, 1, 0, (), ended.pop() if ended else (), 0, 1),
        changes=1,
    )
    lines: list[str] = []
    log = commands.PlainLog(stage.session, lines.append)
    log.obey(HOSTILE.strip())
    log.obey(f"/{HOSTILE.strip()}")
    for _ in range(60):
        stage.client.loop.turn()
        log.refresh()
    told = [line for line in lines if "GET /" in line]
    assert len(told) == 1 and "<U+202E>" in told[0]
    assert len(lines) > 3 and all(map(is_plain, lines)), lines


def test_a_plain_log_has_a_line_for_each_event():
    stage = Stage(slots=2, policy="static")
    lines: list[str] = []
    log = commands.PlainLog(stage.session, lines.append)
    log.refresh()
    stage.client.load()
    log.refresh()
    for order in ('"hello"', "third", "/nonsense", "second"):
        log.obey(order)
    for _ in range(400):
        stage.client.loop.turn()
        log.refresh()
    log.obey("/race 6")
    while not stage.session.settled:
        stage.client.loop.turn()
        log.refresh()
    text = "\n".join(lines)
    for part in (
        "loading: starting",
        "policy static",
        'r1 waits: "hello"',
        "r1 is admitted to slot 0 in step 1",
        "r1 has its first token after",
        "r1 ends (length): 320 tokens, TTFT ",
        "in all (static): 3 requests, 960 tokens, ",
        ": hello",
        "not a command",
        " static, measured   ",
        "continuous takes",
    ):
        assert part in text, part
    times = [float(line.split()[0]) for line in lines if re.match(r" +\d+\.\d{3} s ", line)]
    assert len(times) > 20 and times == sorted(times), (
        "a step was logged at its end, after later events"
    )
    # The first leg used to be logged at its end, with costs that differed from the verdict's, and without the reason
    # why it took longer.
    legs = [line.split("  ") for line in lines if ", measured " in line]
    (static, continuous) = [[part.strip() for part in leg if part][3] for leg in legs]
    said = " ".join(text.split())
    assert f"after {continuous} instead of {static} on average" in said
    assert "On the engine's clock: static " in said


def test_an_interrupted_log_is_complete(stage):
    lines: list[str] = []
    log = commands.PlainLog(stage.session, lines.append)
    stage.obey("/burst 2")
    for _ in range(3):
        stage.client.loop.turn()
        log.refresh()
    before = len(lines)
    log.flush()
    assert len(lines) > before > 0 and any(
        "r2 has its first token" in line for line in lines[before:]
    )


def test_the_log_times_a_policy_switch_by_its_first_step():
    """The log has the start time of the first step under the new policy, even if the view is updated later."""
    stage = Stage(slots=2)
    stage.load()
    lines: list[str] = []
    log = commands.PlainLog(stage.session, lines.append)
    stage.obey("/burst 4")
    stage.turns(5)
    stage.obey("/policy static")
    for _ in range(900):
        stage.client.loop.turn()  # without an update of the view
    log.refresh()
    first = next(column for column in stage.state.history if column.view.policy == "static")
    assert first.step > 1 and f"{first.view.began:8.3f} s  policy static" in lines
    assert lines.index(f"{first.view.began:8.3f} s  policy static") < len(lines) - 4


def test_pages_in_a_log_name_no_keys(stage):
    """Regression: the headings in the log contained "Esc back" and "↑↓ scroll"."""
    stage.obey("/burst 3")
    stage.finish()
    for name in ("requests", "totals", "clients", "errors"):
        said = "\n".join(MENU.pages[name].in_log(stage.state))
        assert said.startswith("── ") and not re.search("Esc|scroll", said), said
    stage.state.view = stage.state.view._replace(server=ServerView("", False, 0, 0, (), (), 0, 0))
    assert "hung up ╳ ──" in MENU.pages["clients"].in_log(stage.state)[0]
