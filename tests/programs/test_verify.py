"""`verify.py` as a user runs it: what is compared, what a receipt reports, and that it finds a matrix product
that is not batch-invariant. The long form tries every way, as the program does by default."""

import json
import re
import sys

import another_blas
import pytest
from checkpoints import make_checkpoint
from long_forms import IS_LONG, long_form
from parity import QWEN3_5
from planted_bugs import BUGS, FAULTS, plant
from processes import run

import nanobatch
import verify
from base import installation

WAYS = ",".join(verify.WAYS) if IS_LONG else "company,prefix_cache,draft tokens,prefill"
COUNT, STORY, COPY, LONG, ALPHABET = verify.QUESTIONS
# The program, with one question
COUNTING = f"""import sys, verify
verify.QUESTIONS = {{{COUNT!r}: {verify.QUESTIONS[COUNT]!r}}}
sys.exit(verify.main())"""


@pytest.fixture(autouse=True)
def no_hash_of_the_demo(monkeypatch) -> None:
    """Skip the demo's hash in the short form, because `tests/kernels` checks it."""
    if not IS_LONG:
        monkeypatch.setattr(verify, "hash_of_the_demo", lambda: "")


@pytest.fixture
def few(monkeypatch) -> int:
    """Ask only two questions in the short form. Return the number of answers."""
    if not IS_LONG:
        ask_only(monkeypatch, COPY, LONG)
    return sum(len(settings.split()) for settings in verify.QUESTIONS.values())


@pytest.fixture
def count_only(monkeypatch) -> None:
    ask_only(monkeypatch, COUNT)


def ask_only(monkeypatch, *questions: str) -> None:
    asked = {question: verify.QUESTIONS[question] for question in questions}
    monkeypatch.setattr(verify, "QUESTIONS", asked)


def test_no_bit_differs(capsys, few):
    """The receipt reports what was compared."""
    assert verify.main(["--ways", WAYS, "--json"]) == 0
    out, progress = capsys.readouterr()
    found = json.loads(out)
    ways = {tally["way"]: tally for tally in found["ways"]}
    assert [*ways] == WAYS.split(",")
    assert all(tally["numbers"] and not tally["differ"] for tally in ways.values())
    assert found["differ"] == 0 and found["first"] == "" and found["promises"] is True
    assert found["answers"] == sum(tally["answers"] for tally in ways.values())
    whole = few * verify.TOKENS * (1 + verify.LIKELIEST)
    assert 0.8 * whole < ways["company"]["numbers"] <= whole  # a grammar may end an answer early
    assert (
        int(ways["prefix_cache"]["note"].split()[0].replace(",", "")) > 200
    )  # enough rows were reused for the comparison to mean something
    assert int(ways["draft tokens"]["note"].split()[0]) > 10
    assert {"greedy", "drawn", "penalties", "regex"} <= set(found["settings"])
    assert len(found["model_sha256"]) == len(found["answers_sha256"]) == 64
    assert found["product"].startswith("rows (") and found["version"].startswith("nanobatch ")
    said = "\n".join(verify.shown(found))
    assert said.startswith("Not one bit differs: ") and found["model_sha256"][:16] in said
    assert all(f"  {way} " in progress for way in ways)  # progress is shown during the comparison


def test_a_model_with_states(capsys, monkeypatch, tmp_path):
    """Prompts start from state checkpoints, even while the requests that saved them continue."""
    ask_only(monkeypatch, COPY)
    monkeypatch.setattr(verify, "TOKENS", 48 if IS_LONG else 12)
    folder = make_checkpoint(tmp_path, **QWEN3_5)
    ways = WAYS if IS_LONG else "checkpoint,fork"
    assert verify.main(["--model", str(folder), "--ways", ways]) == 0
    out = capsys.readouterr().out
    assert "Not one bit differs" in out
    for way, least in (("checkpoint", 3), ("fork", 6)):
        (restored,) = re.findall(rf"(?m)^  {way} .* (\d+) prompts from checkpoints", out)
        assert int(restored) >= least


def test_kv_and_attention_reach_each_engine(capsys, count_only, monkeypatch):
    load, taken = nanobatch.Engine.load, []

    def spy(model, **options):
        taken.append((options.get("kv"), options.get("attention")))
        return load(model, **options)

    monkeypatch.setattr(nanobatch.Engine, "load", spy)
    assert verify.main(["--ways", "company", "--kv", "float32", "--attention", "plain"]) == 0
    assert taken[:2] == [("float32", "plain")] * 2


# --- planted bugs -------------------------------------------------------------------------------

# Some bugs that the receipt once missed, each with a question, its setting, and the number of times it is
# asked
MISSED = {
    "the mask is wrong every 256 rows": (LONG, "greedy", 2),
    "the mask is wrong from row 513 on": (ALPHABET, "drawn", 2),
    "draft tokens are right from the 9th on": (COPY, "greedy", 2),
    "logits change from token 25 on": (COUNT, "greedy", 2),
    "the first one's text is penalized": (COUNT, "penalties", 2),
    "the first one's temperature": (STORY, "drawn", 4),
    "the first one's top_p": (STORY, "filtered", 4),
    "an old owner's bias": (STORY, "bias", 12),
    "a neighbour's grammar": (STORY, "json", 4),
    "an embedding is a neighbour's": (ALPHABET, "embedding", 4),
}


@pytest.fixture(scope="module")
def alone() -> list[verify.Case]:
    return verify.ask_alone(verify.parse_arguments([]))


@pytest.mark.parametrize("bug", MISSED)
def test_a_planted_bug_is_seen(monkeypatch, alone, bug):
    """Regression: these bugs were missed because prompts and answers were too short, few draft tokens were
    accepted, all neighbours were sampled in the same way and never together with a question, and no prompt
    was embedded."""
    question, setting, times = MISSED[bug]
    asked = [case for case in alone if (case.question, case.setting) == (question, setting)] * times
    plant(monkeypatch, bug)
    monkeypatch.setitem(verify.WAYS, "company", {"speculate": 0})  # drafts depend on the clock
    way, *_ = FAULTS[bug]
    assert verify.compare_one(verify.parse_arguments([]), way, asked).differ


@long_form
def test_every_planted_bug_is_seen(capsys):
    """Each bug is found by one of the ways, which are tried in the order of the program."""
    args = verify.parse_arguments([])
    seen = {}
    for bug in [*BUGS, *FAULTS]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            plant(monkeypatch, bug)
            asked = verify.ask_alone(args)
            tallies = (verify.compare_one(args, way, asked) for way in WAYS.split(","))
            seen[bug] = next((tally.way for tally in tallies if tally.differ), "")
        with capsys.disabled():
            print(f"{bug}: {seen[bug] or 'missed'}")
    assert all(seen.values())


def test_planted_order_of_sums_is_found(capsys, count_only, monkeypatch):
    plant(monkeypatch, "sums of 8 rows and more have another order")
    assert verify.main(["--ways", "company"]) == 1
    said = capsys.readouterr().out
    assert "differ, from token " in said and " differ, of " in said
    assert "The first:\n  company: “" in said and "other bits from token " in said


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS of its own elsewhere")
def test_another_blas_shows_what_others_have(tmp_path):
    library = str(another_blas.compiled(tmp_path))
    few = COUNTING.replace("sys.exit", "verify.TOKENS = 16\nsys.exit")  # plain loops are slow
    done = run("-c", few, "--ways", "company", NANOBATCH_BLAS=library)
    assert done.returncode == 1, done.stderr
    named = f"libanother.so, so bits may differ with the batch: NANOBATCH_BLAS={library}"
    assert "Nothing is promised here" in done.stdout and named in done.stdout
    assert " differ, of 3 answers" in done.stdout
    assert re.search(r"numbers, by up to \S+\. The first:", done.stdout)
    assert "Equal in every bit: none of the ways." in done.stdout


def test_other_threads_are_other_processes(capsys, count_only, monkeypatch):
    """`threads` compares with the answers of a process whose product uses a different number of threads."""
    monkeypatch.setattr(verify, "THREADS", ("3",))
    monkeypatch.setattr(installation, "start", lambda program: [sys.executable, "-c", COUNTING])
    assert verify.main(["--ways", "threads"]) == 0
    assert "3 answers" in capsys.readouterr().out


def test_a_killed_process_is_one_line(capsys, count_only, monkeypatch):
    """Regression: the program ended with a traceback."""
    killed = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(installation, "start", lambda program: [sys.executable, "-c", killed])
    assert verify.main(["--ways", "threads"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line == f"nanobatch: the process with NANOBATCH_THREADS={verify.THREADS[0]} exited with -9"
    )


def test_incomparable_ways_are_skipped(capsys, count_only, monkeypatch):
    """A way that cannot run is skipped, for example if widened weights do not fit into memory."""
    load = verify.Engine.load

    def narrow(model, dtype="auto", **options):
        if dtype == "float32":
            raise ValueError("weights take 20 GiB, but 5 are free")
        return load(model, dtype=dtype, **options)

    monkeypatch.setattr(verify.Engine, "load", narrow)
    assert verify.main(["--ways", "widened,prefill"]) == 0
    said = capsys.readouterr().out
    assert "widened          not compared: weights take 20 GiB" in said
    assert "Not one bit differs: " in said
    # The exit code used to be 0 when no numbers were compared
    assert verify.main(["--ways", "widened"]) == 1
    assert "No numbers were compared" in capsys.readouterr().out


def test_model_without_grammars(capsys, count_only, monkeypatch):
    def refuse(self, source):
        raise ValueError("grammar: this tokenizer is unknown")

    monkeypatch.setattr(nanobatch.Tokenizer, "grammar", refuse)
    assert verify.main(["--ways", "company"]) == 0
    assert "settings   greedy, penalties\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--ways", "company,luck"], "--ways: 'luck' is unknown; choose among company,chunks,"),
        (["--rounds", "0"], "--rounds"),
        (["--model", "nowhere"], "--model"),
    ],
)
def test_wrong_option_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        verify.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said in line
