"""`verify.py`, as a stranger runs it: what is compared, what a receipt says, and that a product which
breaks the promise is found. NANOBATCH_VERIFY=1 tries every way, as the program does by itself."""

import json
import os
import sys

import pytest
from processes import run

import verify
from parts.device.matrix import Matrix

QUICK = "company,reuse,guesses,prefill"
WAYS = ",".join(verify.WAYS) if os.environ.get("NANOBATCH_VERIFY") else QUICK
FEW = verify.QUESTIONS if os.environ.get("NANOBATCH_VERIFY") else verify.QUESTIONS[::3]


@pytest.fixture
def few(monkeypatch) -> int:
    """So many answers there are."""
    monkeypatch.setattr(verify, "QUESTIONS", FEW)
    return 2 * len(FEW)


def test_no_bit_differs_and_the_receipt_says_of_what(capsys, few):
    assert verify.main(["--ways", WAYS, "--rounds", "1", "--json"]) == 0
    out, progress = capsys.readouterr()
    found = json.loads(out)
    ways = {tally["way"]: tally for tally in found["ways"]}
    assert [*ways] == WAYS.split(",")
    assert all(tally["answers"] >= few and not tally["differ"] for tally in ways.values())
    assert found["differ"] == 0 and found["first"] == "" and found["promises"] is True
    assert found["answers"] == sum(tally["answers"] for tally in ways.values())
    assert ways["company"]["numbers"] == few * verify.TOKENS * (1 + verify.LIKELIEST)
    assert int(ways["reuse"]["note"].split()[0].replace(",", "")) > 200  # or nothing was tried
    assert int(ways["guesses"]["note"].split()[0]) > 0
    assert len(found["model_sha256"]) == len(found["answers_sha256"]) == 64
    assert found["product"].startswith("rows (") and found["version"].startswith("nanobatch ")
    said = "\n".join(verify.shown(found))
    assert said.startswith("Not one bit differs: ") and found["model_sha256"][:16] in said
    assert all(f"  {way} " in progress for way in ways)  # what is compared, while it is


def test_a_product_that_sums_in_another_order_from_eight_rows_on_is_found(capsys, few, monkeypatch):
    """As a library's does, which has one kernel for few rows and another for many."""
    product = Matrix.__call__

    def in_two_halves(self, x):
        if x.shape[0] < 8:
            return product(self, x)
        half = x.shape[-1] // 2
        near = (verify.device.mx.arange(x.shape[-1]) < half).astype(x.dtype)
        return product(self, x * near) + product(self, x * (1 - near))

    monkeypatch.setattr(Matrix, "__call__", in_two_halves)
    assert verify.main(["--ways", "company", "--rounds", "1"]) == 1
    said = capsys.readouterr().out
    assert "differ, from token " in said
    assert "The first:\n  company: “" in said and "other bits from token " in said


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS of its own elsewhere")
def test_another_blas_shows_what_others_have():
    code = "import sys, verify; verify.QUESTIONS = verify.QUESTIONS[:2]; sys.exit(verify.main())"
    done = run("-c", code, "--ways", "company", "--rounds", "1", NANOBATCH_BLAS="openblas")
    assert done.returncode == 1
    assert "Nothing is promised here" in done.stdout and "openblas (" in done.stdout
    assert "4 differ, of 4 answers" in done.stdout


def test_other_threads_are_other_processes(capsys, monkeypatch):
    """The answers of a process whose product has another number of threads are compared, too."""
    monkeypatch.setattr(verify, "THREADS", ("3",))
    assert verify.main(["--ways", "threads"]) == 0
    assert "14 answers" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said_and_the_rest_is_compared(capsys, few, monkeypatch):
    """Such as weights that do not fit the memory when they are widened."""
    load = verify.Engine.load

    def narrow(model, dtype="auto", **options):
        if dtype == "float32":
            raise ValueError("weights take 20 GiB, but 5 are free")
        return load(model, dtype=dtype, **options)

    monkeypatch.setattr(verify.Engine, "load", narrow)
    assert verify.main(["--ways", "widened,prefill"]) == 0
    said = capsys.readouterr().out
    assert (
        "widened          not compared: weights take 20 GiB" in said
        and f"{3 * few} answers" in said
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--ways", "company,luck"], "--ways: 'luck' is none; choose among company,chunks,"),
        (["--rounds", "0"], "--rounds"),
        (["--model", "nowhere"], "--model"),
    ],
)
def test_a_mistake_on_the_command_line_gets_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        verify.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said in line
