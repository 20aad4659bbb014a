"""A conversation in the terminal (`ask.py --chat`): the messages that the model receives, errors instead
of silent truncation, and the keys."""

import json
import os
import re
from pathlib import Path

import pytest
from harness import exactly
from processes import run
from terminals import Terminal

from cli.chat_model import EngineModel
from cli.terminal_chat import Conversation, Dialogue, History, chat_in_terminal, history_file
from nanobatch import Engine, SamplingParams

ROOT = Path(__file__).parents[2]
SHORT = exactly(12)


@pytest.fixture(scope="module")
def engine():
    with Engine.load("demo", slots=1, max_len=160) as engine:
        yield engine


def talk(engine: Engine, *lines: str, sampling: SamplingParams = SHORT) -> tuple[Dialogue, str]:
    """Type these lines, and return the dialogue and its output."""
    typed = iter(lines)
    written = []

    def read(asked: str) -> str:
        written.append(asked)
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    dialogue = Dialogue(EngineModel(engine, sampling), read, written.append)
    assert dialogue.run() == 0
    return dialogue, "".join(written)


def test_question_continues_the_conversation(engine):
    """Each prompt contains the whole conversation so far."""
    dialogue, said = talk(engine, "Count from 3 to 5.", "And back?")
    first, second = dialogue.talk.turns[1]["content"], dialogue.talk.turns[3]["content"]
    alone = [{"role": "user", "content": "Count from 3 to 5."}]
    both = [
        *alone,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And back?"},
    ]
    for messages, answer in ((alone, first), (both, second)):
        assert engine.submit(messages, SHORT).result().text == answer
        assert answer in said


def test_system_message_survives_new(engine):
    """`/new` keeps the system message, and an empty `/system` removes it."""
    dialogue, _ = talk(engine, "/system Be brief.", "Why batch?", "/new", "Who are you?")
    roles = [message["role"] for message in dialogue.talk.messages()]
    assert roles == ["system", "user", "assistant"]
    assert dialogue.talk.messages()[1]["content"] == "Who are you?"
    dialogue, _ = talk(engine, "/system Be brief.", "/system")
    assert dialogue.talk.messages() == []


def test_drop_makes_room(engine):
    """A question that does not fit is kept, and submitted again after `/drop` removes the oldest turn."""
    long = "Count from 3 to 5. " * 11
    sampling = exactly(60)
    dialogue, said = talk(engine, long, long, "/drop", sampling=sampling)
    assert "tokens are left: /drop and /new make room" in said
    assert re.search(
        r"the conversation has \d+ tokens, and a slot holds 160, answer included: /drop", said
    )
    assert "forgotten: 'Count from" in said
    assert [turn["content"] for turn in dialogue.talk.turns][:1] == [long]
    assert len(dialogue.talk.turns) == 2 and dialogue.waiting == ""


def test_question_longer_than_a_slot_is_kept(engine):
    """A question that is too long can be dropped, and the next one is answered."""
    dialogue, said = talk(engine, "word " * 400, "/drop", "Why batch?")
    assert "a slot holds 160" in said and len(dialogue.talk.turns) == 2


def test_several_lines_are_one_question(engine):
    dialogue, said = talk(engine, '"""Count', "from 3", 'to 5."""', "", "   ")
    assert dialogue.talk.turns[0]["content"] == "Count\nfrom 3\nto 5."
    assert said.count("... ") == 2 and len(dialogue.talk.turns) == 2


def test_input_that_ends_inside_a_question(engine):
    """Regression: the question was silently lost."""
    dialogue, said = talk(engine, '"""Count', "from 3")
    assert 'nanobatch: the input ended before the closing """' in said and not dialogue.talk.turns


def test_a_file_goes_with_a_question(engine, tmp_path, monkeypatch):
    """`@notes.txt` in a question inserts the file before it, and other words with @ are left alone."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("a ``` b\n")
    Path("other.bin").write_bytes(b"\xff\0")
    question = "What is in @notes.txt? Ask @ada or @app.route."
    dialogue, said = talk(engine, question)
    asked = dialogue.talk.turns[0]["content"]
    assert asked == f"notes.txt:\n````\na ``` b\n\n````\n\n{question}"
    assert re.search(r"with notes.txt, \d+ tokens\n", said)
    dialogue, said = talk(engine, "What is @other.bin")
    assert "@other.bin cannot be read (" in said and not dialogue.talk.turns


def test_a_conversation_that_was_saved_goes_on(engine, tmp_path):
    file = tmp_path / "talk.json"
    before, _ = talk(engine, "/system Be brief.", "Why batch?", f"/save {file}", "And then?")
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    after, said = talk(engine, f"/load {file}", "And then?")
    assert after.talk.messages() == before.talk.messages()
    assert "continues after 1 question" in said


def test_a_loaded_conversation_has_no_waiting_question(engine, tmp_path):
    """Regression: `/drop` asked a question of the conversation that was left."""
    file = tmp_path / "talk.json"
    lines = ("Why batch?", f"/save {file}", "word " * 400, f"/load {file}", "/drop")
    dialogue, said = talk(engine, *lines)
    assert "forgotten: 'Why batch?'" in said and said.count("a slot holds 160") == 1
    assert dialogue.waiting == "" and not dialogue.talk.turns


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "[1]",
        '{"messages": 3}',
        '{"messages": [{"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "x"}]}',
        '{"messages": [{"role": "tool"}, {"content": "x"}]}',
        '{"messages": ["x", "y"]}',
        # Such a file used to be loaded, and `/drop` then failed with a traceback
        '{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}',
        "[" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
def test_bad_conversation_file_is_one_line(engine, tmp_path, contents):
    file = tmp_path / "talk.json"
    file.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    dialogue, said = talk(engine, "Why batch?", f"/load {file}", "/save /no/such/folder/x")
    (line,) = [line for line in said.splitlines() if "is not a conversation" in line]
    assert line.startswith(">>> nanobatch: ") and "cannot be written" in said
    assert len(dialogue.talk.turns) == 2  # the conversation so far is still there


def test_a_command_that_is_wrong_is_named(engine):
    """Regression: the help was printed without saying what was wrong."""
    dialogue, said = talk(engine, "/what", "/drop", "/retry", "/save", "/help", "/bye", "Why?")
    assert "nanobatch: '/what' is not a command; /help lists them" in said
    assert "nothing to forget" in said and "nothing to ask again" in said
    assert "/save needs a file: /save FILE" in said
    assert said.count("/system TEXT") == 1 and not dialogue.talk.turns


def test_retry_asks_the_last_question_again(engine):
    dialogue, said = talk(engine, "Count from 3 to 5.", "And back?", "/set seed=4", "/retry")
    questions = [turn["content"] for turn in dialogue.talk.turns[::2]]
    assert questions == ["Count from 3 to 5.", "And back?"] and said.count("[read ") == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_retry_keeps_the_answer(engine, monkeypatch, error):
    """If the repeated question is rejected, or stopped before its answer begins, the old answer is kept."""
    typed = iter(["Count from 3 to 5.", "/retry"])
    dialogue = Dialogue(EngineModel(engine, SHORT), lambda asked: next(typed), lambda text: None)
    with engine.serving():
        dialogue.handle_line(next(typed))
        before = dialogue.talk.messages()
        monkeypatch.setattr(engine, "submit", lambda *_: (_ for _ in ()).throw(error("no")))
        with pytest.raises(error, match="no"):
            dialogue.handle_line("/retry")
    assert dialogue.talk.messages() == before


def test_set_changes_how_answers_are_sampled(engine):
    dialogue, said = talk(
        engine, "/set temperature=0.7 seed=3 max_tokens=5", "/set", "/set seed=none"
    )
    assert dialogue.changes == {"temperature": 0.7, "seed": None, "max_tokens": 5}
    assert said.count("temperature=0.7 top_p=1.0 top_k=0 min_p=0.0") == 3
    _, said = talk(engine, "/set heat=1", "/set seed", "/set temperature=hot", "/set top_p=0")
    assert "/set 'heat=1': give NAME=NUMBER; the names are temperature, top_p" in said
    assert "/set 'seed'" in said and "temperature = 'hot', but it must be a number" in said
    assert "top_p = 0 keeps no token" in said and "temperature=0.0" not in said


def test_a_thought_is_kept_apart_from_the_answer():
    conversation = Conversation()
    conversation.add("Why?", "So.", "Hmm.")
    assert conversation.messages()[1] == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Hmm.",
    }


def until(terminal: Terminal, text: bytes) -> None:
    """Wait for a text, and discard everything up to its end."""
    while text not in terminal.raw:
        assert terminal.process.poll() is None, terminal.raw
        terminal.read(1)
    terminal.raw = terminal.raw.partition(text)[2]


def test_ctrl_c_stops_only_the_answer(tmp_path):
    """Without a prompt, a dialogue starts. The up key recalls the question."""
    options = ("--ignore-eos", "--max-len", "4096")
    home = {"XDG_STATE_HOME": str(tmp_path), "NANOBATCH_HISTORY": "on", "TERM": "xterm"}
    with Terminal(
        *options, program="ask.py", environment=home, preexec_fn=lambda: os.login_tty(0)
    ) as terminal:
        until(terminal, b">>> ")
        terminal.type("Tell me a story.\n")
        until(terminal, b"story.\r\n")
        while not terminal.raw.strip():
            terminal.read(1)
        terminal.type("\x03")
        until(terminal, b"; stopped]")
        until(terminal, b">>> ")
        while b"(Ctrl-D ends)" not in terminal.raw:
            # If Ctrl-C arrives before the line editor waits, Python handles it only at the next key
            terminal.type("\x03")
            terminal.read(1)
        until(terminal, b"(Ctrl-D ends)")
        terminal.type("\x1b[A")  # Up
        until(terminal, b"Tell me a story.")
        terminal.type("\x15/bye\n")  # Ctrl-U clears the line
        assert terminal.process.wait(60) == 0
    file = tmp_path / "nanobatch" / "history"
    assert "Tell me a story." in file.read_text()
    assert file.stat().st_mode & 0o077 == 0 and file.parent.stat().st_mode & 0o077 == 0


def test_a_history_file_with_zeros_is_read(tmp_path):
    """Regression: a block of the file lost in a crash reads as zeros. `readline` refuses a NUL, so `--chat`
    failed with a traceback."""
    file = tmp_path / "history"
    file.write_bytes(b"Why batch?\n\0\0\0\0\nWhat is a\0 slot?\n")
    assert History(file).questions == ["Why batch?", "What is a slot?"]


def test_history_can_be_turned_off(monkeypatch):
    assert history_file().name == "history"
    monkeypatch.setenv("NANOBATCH_HISTORY", "off")
    assert history_file() is None


def test_chat_needs_a_template(parts):
    """A model without a chat template is refused, because turns cannot be formatted."""
    with (
        Engine(*parts, slots=1, max_len=64) as engine,
        pytest.raises(ValueError, match="no chat template"),
    ):
        chat_in_terminal(engine, SHORT, [])


def test_conversation_over_a_pipe():
    """A prompt on the command line starts the conversation."""
    prompt = "Count from 3 to 5."
    done = run("ask.py", "--chat", "--max-tokens", "8", prompt, input="And back?\n")
    assert done.returncode == 0, done
    assert done.stdout.count("[read ") == 2 and "were still in the slot" in done.stdout
