"""The command line as a user runs it: a process, its two streams, and its exit code.

A new process takes ten times as long to import MLX as to answer. So tests that do not need a separate
process run `main` in this one (`here`), with the same streams and exit codes.
"""

import io
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from processes import python, run, without_backend
from tokenizers import Tokenizer, models

import ask
import bench
import serve
import tui
from cli import options as program
from cli.terminal_chat import on_terminal
from text.tool_parser import ParsedPart

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("cli"), seed=1))


def asked(*arguments: str, **how: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "ask.py", *arguments, cwd="/", **how)


@pytest.fixture
def here(model, capfd, monkeypatch):
    """Return a function that runs a program's `main` in this process. `ask.py` gets the fixture's model unless
    the arguments name another one."""

    def run_here(*arguments: str, main=ask.main, stdin: str = "") -> subprocess.CompletedProcess:
        if main is ask.main and "--model" not in arguments:
            arguments = ("--model", model, *arguments)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                program.run(lambda: main(list(arguments)))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(arguments, ended.value.code, *capfd.readouterr())

    return run_here


def lines(stream: str) -> list[str]:
    """Return the messages, excluding those of every start: slots and memory, and the template."""
    always = (" of memory free at start", "no chat template")
    return [line for line in stream.splitlines() if not any(a in line for a in always)]


def test_prompts_run_at_once(here):
    """Each answer is followed by its metrics."""
    done = here("--prompt", "one", "--prompt", "two", "--max-tokens", "8", "--ignore-eos")
    text = done.stdout
    assert done.returncode == 0, done.stderr
    assert text.index("--- 1: one") < text.index("--- 2: two")
    assert text.count("[length: 8 tokens, TTFT ") == 2 and text.count(" tokens/s]") == 2


def headings(done: subprocess.CompletedProcess) -> list[str]:
    found = [line for line in done.stdout.splitlines() if line[:4] == "--- "]
    return [line.partition(": ")[2] for line in found]


@pytest.mark.parametrize(
    "arguments",
    [
        ["one", "--max-tokens", "8", "two", "--ignore-eos"],
        ["one", "--ignore-eos", "--max-tokens=8", "--prompt", "two"],
        ["--prompt", "two", "--max-tokens", "8", "one", "--ignore-eos"],  # positional prompts first
        ["--ignore-eos", "--max-tokens", "8", "--", "one", "two"],
    ],
)
def test_prompts_and_options_in_any_order(here, arguments):
    expected = here("--prompt", "one", "--prompt", "two", "--max-tokens", "8", "--ignore-eos")
    done = here(*arguments)
    assert done.returncode == 0, done.stderr
    assert headings(done) == headings(expected) == ["one", "two"]
    assert answer(done) == answer(expected) != []


@pytest.mark.parametrize(
    ("arguments", "prompts"),
    [
        ([], ["a question"]),
        (["--prompt", "-"], ["a question"]),
        (["-", "first"], ["a question", "first"]),
    ],
)
def test_no_prompt_reads_standard_input(here, arguments, prompts):
    """A dash among the prompts also reads standard input."""
    settings = ["--max-tokens", "8", "--ignore-eos"]
    done = here(*settings, *arguments, stdin="a question")
    assert done.returncode == 0 and headings(done) == prompts
    assert answer(done) == answer(here(*settings, *prompts)) != []


@pytest.mark.parametrize("arguments", [[], ["first", "-"]])
def test_empty_standard_input(here, arguments):
    """Regression: the message was "the prompt is empty", even if no prompt was given."""
    done = here(*arguments, stdin="")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("nanobatch: standard input has no prompt; ")


@pytest.mark.parametrize("before", [[], ["one"]])
def test_two_dashes_end_the_options(here, before):
    """Regression: `-- --odd` was refused unless a positional prompt preceded it, because argparse dropped
    the two dashes."""
    odd = ["--odd", "two", "--max-tokens", "--"]
    done = here(*before, "--max-tokens", "4", "--prompt=--what", "--", *odd)
    assert done.returncode == 0, done.stderr
    assert headings(done) == [*before, *odd, "--what"]


def test_a_seed_repeats_across_processes(here, model):
    """The same seed gives the same answer in another process, and a stop string truncates it."""
    options = f"--model {model} --prompt one --max-tokens 30 --ignore-eos --temperature 1"
    arguments = options.split()
    first = asked(*arguments, "--seed", "1")
    assert answer(here(*arguments, "--seed", "1")) == answer(first)
    assert answer(here(*arguments, "--seed", "2")) != answer(first)
    text = "\n".join(answer(first))
    stop = next(char for char in text[5:] if char.isalnum())
    ended = here(*arguments, "--seed", "1", "--stop", stop)
    assert "\n".join(answer(ended)) == text[: text.index(stop)] and "[stop: " in ended.stdout


def test_chat_template_and_raw(here, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("<|user|>{{ messages[0].content }}<|end|>")
    arguments = ["--prompt", "one", "--max-tokens", "8", "--ignore-eos"]
    plain, chat = here(*arguments), here("--model", str(folder), *arguments)
    assert answer(chat) != answer(plain)
    assert answer(here("--model", str(folder), *arguments, "--raw")) == answer(plain)
    assert "no chat template" in plain.stderr and "no chat template" not in chat.stderr


def test_endless_template_is_one_line(here, model, tmp_path):
    """The line names the file, the limit and the remedy. The model does not answer without the template
    unless `--raw` is given."""
    folder = shutil.copytree(model, tmp_path / "endless")
    loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loops)
    arguments = ["--model", str(folder), "--prompt", "one", "--max-tokens", "8"]
    refused = here(*arguments)
    line = refused.stderr.splitlines()[-1]
    assert refused.returncode == 2 and not refused.stdout
    assert str(folder / "chat_template.jinja") in line
    # On a busy machine the check may not get its second of processor time
    assert "takes more than 1 s for a sample conversation" in line or "cannot be checked" in line
    assert "give plain text" in line
    raw = here(*arguments, "--raw")
    assert raw.returncode == 0 and answer(raw)


def test_the_chosen_slots_and_memory_are_said(here):
    done = here("--prompt", "x", "--max-tokens", "1")
    assert (
        "nanobatch: llama, 2 layers; float32, 377 KiB; "
        "1 slot of 1,024 tokens in a slab of 512 KiB; " in done.stderr
    )


def answer(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in lines(done.stdout) if not line.startswith(("---", "    ["))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./nowhere"], "./nowhere"),
        (["--prompt", ""], "empty"),
        (["--max-tokens", "0"], "max_tokens = 0"),
        (["--max-tokens", "2000"], "slot holds"),
        (["--slots", "0"], "nanobatch: --slots = '0', but"),
        (["--max-len", "-1"], "--max-len = '-1'"),
        (["--max-len", "1" + "0" * 23], "--max-len = '1000"),
        (["--slots", "1" + "0" * 19], "--slots = '1"),
        (["--model", "x" * 400], "xxx"),
        (["--model", "~nobody/x"], "~nobody/x"),
        (["--max-len", "999999999"], "--max-len"),
        (["--temperature", "-1"], "temperature = -1"),
        (["--temperature", "nan"], "temperature = nan"),
        (["--stop", ""], "stop holds ''"),
        (["--policy", "magic"], "magic"),
        (["--max-tokens", "many"], "many"),
        (["--magic"], "--magic"),
    ],
)
def test_a_mistake_gets_its_line_and_exit_code_2(here, arguments, words):
    done = here("--prompt", "hello", *arguments)
    said = lines(done.stderr)
    assert done.returncode == 2 and words in said[-1], said
    assert "Traceback" not in "\n".join(said)
    assert len(said) == 1 or said[0].startswith("usage:"), said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "x"],
        ["--port", "70000"],
        ["--slots", "0"],
        ["--max-len", "1"],
        ["--max-queue", "-1"],
        ["--policy", "lifo"],
        ["--model", "/no/such/folder"],
        ["--model", ""],
        ["--host", "256.1.1.1"],
        ["--host", "203.0.113.1"],
        ["--log-file", "/no/such/folder/log"],
        ["--nonsense"],
        ["--api-key", ""],  # "$KEY" with KEY unset; accepting it would leave the server open
        # HTTP strips spaces around a header's value, so no client could send this key
        ["--api-key", "key\n"],
        ["--watch-key", " "],
        # No client sends such a host, so the option would match nobody
        ["--allow-host", "https://llm.example"],
        ["--allow-host", "*"],
        ["--allow-host", "file://"],
        ["--allow-host", "app://x/y"],
    ],
)
def test_wrong_server_option_is_one_line(here, arguments):
    """The exit code is 2."""
    done = here("--port", "0", *arguments, main=serve.main)
    (line,) = lines(done.stderr)
    assert done.returncode == 2 and line.startswith("nanobatch: "), done


# A tokenizer with a single word and no token for unknown words.
LATE = Tokenizer(models.WordLevel({"hello": 0}, unk_token="[UNK]")).to_str().encode()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "config.json is missing"),
        ("model.safetensors", None, "neither model*.safetensors nor a GGUF file"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("config.json", b"[" * 100_000, "config.json"),
        ("tokenizer.json", b"[]", "not a tokenizer"),
        ("tokenizer.json", LATE, "cannot read this prompt (WordLevel error: Missing [UNK] token"),
        (
            "chat_template.jinja",
            b"{{ " + b"(" * 3000 + b"1" + b")" * 3000 + b" }}",
            "recursion depth",
        ),
    ],
)
def test_a_broken_model_is_one_line(here, model, tmp_path, file, content, words):
    """The exit code is 2."""
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    done = here("--model", str(folder), "--prompt", "x")
    assert done.returncode == 2 and len(lines(done.stderr)) == 1 and words in lines(done.stderr)[0]


ENDLESS = ["--prompt", "x", "--max-tokens", "100000", "--max-len", "100100", "--ignore-eos"]


def test_closed_pipe_exits_with_141(model):
    """A reader that closes the pipe, as in `ask.py ... | head -1`, causes no traceback."""
    words = [sys.executable, str(ROOT / "ask.py"), "--model", model, *ENDLESS]
    command = ["bash", "-c", '"$@" | head -c 20 > /dev/null; exit ${PIPESTATUS[0]}', "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr and "written" not in done.stderr


def test_a_prompt_that_is_no_text_gets_its_line(model):
    command = [sys.executable, str(ROOT / "ask.py"), "--model", model, "--prompt", "-"]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=300)
    assert done.returncode == 2 and len(lines(done.stderr.decode())) == 1


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_ends_an_answer_at_once(model, sent, code, background_job):
    """The signal works even in a background job."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "ask.py"), "--model", model, *ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=background_job,
    )
    process.stdout.read(40)  # returns once the program is decoding
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("asked", [ask, serve, tui, bench], ids=lambda module: module.__name__)
def test_version(here, asked):
    """The version comes from pyproject.toml and is defined nowhere else."""
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = here("--version", main=asked.main)
    assert (done.returncode, done.stderr) == (0, "")
    line = rf"nanobatch {re.escape(number)} \(mlx \S+, Python \S+, \w+ \w+\)\n"
    assert re.fullmatch(line, done.stdout)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (ask, ["--max-tokens"]),
        (ask, ["--slots=1", "--what"]),
        (ask, ["--model"]),
        (tui, ["--policy"]),
        (tui, ["--script"]),
        (tui, ["--record"]),
        (bench, ["--parts"]),
        (bench, ["--shape"]),
    ],
)
def test_long_value_is_quoted_shortened(here, program, arguments):
    """Regression: the message repeated all 5,000 characters."""
    *others, option = arguments
    value = "x" * 4000 + "\x1b[31m\n" + "y" * 1000
    done = here(*others, f"{option}={value}", main=program.main)
    (line,) = lines(done.stderr)
    assert done.returncode == 2 and line.startswith("nanobatch: ") and len(line) < 500
    assert "\x1b" not in line and "x" * 10 in line and "y" * 1000 not in line


# --- the BLAS under MLX -------------------------------------------------------------------------


def test_blas_off_is_silent():
    done = python(
        "import nanobatch; from kernels import device; print(device.blas)",
        NANOBATCH_BLAS="off",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("mlx\n", "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS of its own elsewhere")
def test_a_blas_that_cannot_be_loaded_is_named(model):
    refused = {
        "/no/such/lib.so": "/no/such/",
        "/no/such/\udcff": "/no/such/",  # a byte that is not UTF-8
        "libm.so.6": "libm.so.6 is not a BLAS",
    }
    for name, said in refused.items():
        done = asked("--model", model, "--prompt", "x", NANOBATCH_BLAS=name)
        (line,) = lines(done.stderr)
        assert done.returncode == 2 and line.startswith(f"nanobatch: NANOBATCH_BLAS={said}")


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS of its own elsewhere")
def test_without_our_product(tmp_path):
    """If ctypes cannot load the C library, MLX computes the products, and `device.blas` says why."""
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes\ndef none(*args, **options): raise OSError('not found')\nctypes.CDLL = none\n"
    )
    done = python(
        "import nanobatch; from kernels import device; print(device.blas)",
        PYTHONPATH=str(tmp_path),
        NANOBATCH_BLAS="",
    )
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    said = "mlx, so bits may differ with the batch: the matrix product cannot be loaded (not found)"
    assert done.stdout.strip() == said


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX always has its backend")
def test_a_missing_backend_names_the_extra(model, tmp_path):
    broken = without_backend(tmp_path)
    done = asked("--model", model, "--prompt", "x", **broken)
    assert done.returncode == 2
    assert len(lines(done.stderr)) == 1 and "pip install -e '.[cpu]'" in lines(done.stderr)[0]
    # The screen loads the model in a thread. The message used to be lost there
    watched = run(ROOT / "tui.py", "--plain", "--script", "burst1", **broken)
    assert watched.returncode == 2
    assert len(lines(watched.stderr)) == 1 and "pip install -e '.[cpu]'" in lines(watched.stderr)[0]
    imported = python("import nanobatch", **broken)
    assert imported.returncode == 1 and "ImportError: MLX has no backend here" in imported.stderr


# --- environments -------------------------------------------------------------------------------


def test_read_only_tmpdir_and_missing_home(here, model):
    arguments = ("--model", model, "--prompt", "hello", "--max-tokens", "8", "--ignore-eos")
    expected = answer(here(*arguments))
    environment = {"PATH": "/nowhere", "TMPDIR": "/proc", "HOME": "/proc/nowhere"}
    done = asked(*arguments, **environment)
    assert done.returncode == 0 and answer(done) == expected, done.stderr


def test_model_name_is_its_folder(tmp_path, monkeypatch):
    """Regression: `--model .` served a model without a name, which no request could ask for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    assert {program.name_of(text) for text in ("small", "small/", "./small", "small/../small")} == {
        "small"
    }
    assert program.name_of(".") == tmp_path.name
    hub = tmp_path / "models--owner--name" / "snapshots" / "0a1b2c"
    hub.mkdir(parents=True)
    assert program.name_of(str(hub)) == "owner/name"
    assert (program.name_of("owner/name"), program.name_of("demo")) == ("owner/name", "demo")


def test_on_a_terminal_a_thought_is_dim():
    assert on_terminal(ParsedPart("reasoning", "Hm\x1b[31m.")) == "\x1b[2mHm[31m.\x1b[22m"
    assert on_terminal(ParsedPart("content", "Yes.")) == "Yes."
