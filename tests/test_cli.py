"""The command line, run as a user runs it: a process, its two streams, and its exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("cli"), seed=1))


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "nanobatch.py"), *arguments],
        input=stdin.encode(),
        capture_output=True,
        timeout=60,
        env=os.environ | environment,
        cwd="/",
    )


def lines(stream: bytes) -> list[str]:
    """What was said, without the advice about a missing BLAS."""
    return [line for line in stream.decode(errors="replace").splitlines() if "reference BLAS" not in line]


def test_prompts_run_at_once_and_each_answer_comes_with_its_figures(model):
    done = run("--model", model, "--prompt", "one", "--prompt", "two", "--max-tokens", "8", "--ignore-eos")
    text = done.stdout.decode(errors="replace")
    assert done.returncode == 0, done.stderr
    assert text.index("--- 1: one") < text.index("--- 2: two")
    assert text.count("[length: 8 tokens, TTFT ") == 2 and text.count(" tokens/s]") == 2


def test_a_dash_reads_the_prompt_from_standard_input(model):
    given = run("--model", model, "--prompt", "a question", "--max-tokens", "8", "--ignore-eos")
    piped = run("--model", model, "--prompt", "-", "--max-tokens", "8", "--ignore-eos", stdin="a question")
    assert answer(piped) == answer(given) != []


def answer(done: subprocess.CompletedProcess) -> list[str]:
    return [line for line in lines(done.stdout) if not line.startswith(("---", "    ["))]


@pytest.mark.parametrize("option", [["--policy", "static"], ["--policy", "serial"], ["--compact"], ["--slots", "1"]])
def test_no_option_changes_the_answer(model, option):
    prompts = ["--prompt", "one", "--prompt", "two", "--max-tokens", "8", "--ignore-eos"]
    assert answer(run("--model", model, *prompts, *option)) == answer(run("--model", model, *prompts))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./nowhere"], "./nowhere"),
        (["--prompt", ""], "empty"),
        (["--max-tokens", "0"], "max_tokens = 0"),
        (["--max-tokens", "2000"], "slot holds"),
        (["--slots", "0"], "slots = 0"),
        (["--max-len", "-1"], "max_len = -1"),
        (["--policy", "magic"], "magic"),
        (["--max-tokens", "many"], "many"),
        (["--magic"], "--magic"),
    ],
)
def test_a_mistake_gets_its_line_and_exit_code_2(model, arguments, words):
    done = run(*(["--model", model] if "--model" not in arguments else []), "--prompt", "hello", *arguments)
    said = lines(done.stderr)
    assert done.returncode == 2 and words in said[-1], said
    assert "Traceback" not in "\n".join(said)
    assert len(said) == 1 or said[0].startswith("usage:"), said


def test_ctrl_c_while_it_answers_ends_it_quietly(model):
    endless = ["--model", model, "--prompt", "x", "--max-tokens", "100000", "--max-len", "100100", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "nanobatch.py"), *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(40)  # it is answering by now
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - began < 3
    assert b"Traceback" not in stderr


# --- what lies under MLX -----------------------------------------------------------------------------------------


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment, text=True)


def test_the_blas_can_be_turned_off_and_then_nothing_is_said():
    done = python("import nanobatch, blas; print(blas.name)", NANOBATCH_BLAS="off")
    assert (done.stdout, done.stderr, done.returncode) == ("mlx\n", "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS of its own elsewhere")
def test_a_blas_that_cannot_be_loaded_is_named(model):
    done = run("--model", model, "--prompt", "x", NANOBATCH_BLAS="/no/such/lib.so")
    assert done.returncode == 2 and lines(done.stderr)[0].startswith("nanobatch: NANOBATCH_BLAS=/no/such/lib.so")
    assert len(lines(done.stderr)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS of its own elsewhere")
def test_without_a_fast_blas_one_line_says_what_to_install(tmp_path):
    """A ctypes that finds no library, as on a machine that has none."""
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes\ndef none(*args, **options): raise OSError('not found')\nctypes.CDLL = none\n"
    )
    done = python(
        "import nanobatch, blas; print(blas.name)", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}", NANOBATCH_BLAS=""
    )
    assert done.returncode == 0 and done.stdout == "mlx\n"
    assert done.stderr.count("\n") == 1 and "apt install libopenblas0-pthread" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX always has its backend")
def test_a_missing_backend_says_which_extra_to_install(model, tmp_path):
    """An mlx package without its library, as `pip install mlx` leaves it on Linux."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')\n")
    done = run("--model", model, "--prompt", "x", PYTHONPATH=str(tmp_path), NANOBATCH_BLAS="off")
    assert done.returncode == 2
    assert len(lines(done.stderr)) == 1 and "pip install -e '.[cpu]'" in lines(done.stderr)[0]
    imported = python("import nanobatch", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", NANOBATCH_BLAS="off")
    assert imported.returncode == 1 and "ImportError: MLX has no backend here" in imported.stderr


# --- environments ------------------------------------------------------------------------------------------------


def test_no_compiler_a_broken_compiler_and_a_read_only_tmpdir_change_nothing(model, tmp_path):
    arguments = ("--model", model, "--prompt", "hello", "--max-tokens", "8", "--ignore-eos")
    expected = answer(run(*arguments))
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "g++").write_text("#!/bin/sh\nexit 1\n")
    (broken / "g++").chmod(0o755)
    for environment in ({"PATH": "/nowhere"}, {"PATH": str(broken)}, {"TMPDIR": "/proc"}, {"HOME": "/nowhere"}):
        done = run(*arguments, **environment)
        assert done.returncode == 0 and answer(done) == expected, (environment, done.stderr)
