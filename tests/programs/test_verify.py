"""`verify.py`, as a user runs it: what is compared, what a receipt says, and that a product which
breaks the promise is found. NANOBATCH_VERIFY=1 tries every way, as the program does by itself."""

import json
import os
import re
import sys

import pytest
from processes import run

import nanobatch
import runner
import sampling
import sched
import verify
from kernels import c_attention
from kernels.device import mx
from kernels.packed import Matrix

IS_LONG = "NANOBATCH_VERIFY" in os.environ
WAYS = ",".join(verify.WAYS) if IS_LONG else "company,prefix_cache,draft tokens,prefill"
COUNT, STORY, COPY, LONG, ALPHABET = verify.QUESTIONS
# The program, with one question
COUNTING = f"""import sys, verify
verify.QUESTIONS = {{{COUNT!r}: {verify.QUESTIONS[COUNT]!r}}}
sys.exit(verify.main())"""


@pytest.fixture(autouse=True)
def no_hash_of_the_demo(monkeypatch) -> None:
    """`tests/kernels` has it."""
    if not IS_LONG:
        monkeypatch.setattr(verify, "hash_of_the_demo", lambda: "")


@pytest.fixture
def few(monkeypatch) -> int:
    """The number of answers: of two questions, or in the long form of all."""
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
    """The receipt says what was compared."""
    assert verify.main(["--ways", WAYS, "--json"]) == 0
    out, progress = capsys.readouterr()
    found = json.loads(out)
    ways = {tally["way"]: tally for tally in found["ways"]}
    assert [*ways] == WAYS.split(",")
    assert all(tally["numbers"] and not tally["differ"] for tally in ways.values())
    assert found["differ"] == 0 and found["first"] == "" and found["promises"] is True
    assert found["answers"] == sum(tally["answers"] for tally in ways.values())
    whole = few * verify.TOKENS * (1 + verify.LIKELIEST)
    assert 0.8 * whole < ways["company"]["numbers"] <= whole  # a grammar may end an answer
    assert (
        int(ways["prefix_cache"]["note"].split()[0].replace(",", "")) > 200
    )  # or nothing was tried
    assert int(ways["draft tokens"]["note"].split()[0]) > 10
    assert {"greedy", "drawn", "penalties", "regex"} <= set(found["settings"])
    assert len(found["model_sha256"]) == len(found["answers_sha256"]) == 64
    assert found["product"].startswith("rows (") and found["version"].startswith("nanobatch ")
    said = "\n".join(verify.shown(found))
    assert said.startswith("Not one bit differs: ") and found["model_sha256"][:16] in said
    assert all(f"  {way} " in progress for way in ways)  # what is compared, while it is


def test_kv_and_attention_reach_each_engine(capsys, count_only, monkeypatch):
    load, taken = nanobatch.Engine.load, []

    def spy(model, **options):
        taken.append((options.get("kv"), options.get("attention")))
        return load(model, **options)

    monkeypatch.setattr(nanobatch.Engine, "load", spy)
    assert verify.main(["--ways", "company", "--kv", "float32", "--attention", "plain"]) == 0
    assert taken[:2] == [("float32", "plain")] * 2


# --- planted faults: an answer alone is right, and in company it is not -------------------------


def hide_rows_from_256_on(monkeypatch):
    visible_rows = c_attention.visible_rows

    def hidden(windows, *rest):
        rows = visible_rows(windows, *rest)
        most = [255 if window.B > 1 else 10**6 for window in windows for _ in window.positions]
        rows[:, 2] = mx.minimum(rows[:, 2], mx.array(most))
        return rows

    monkeypatch.setattr(c_attention, "visible_rows", hidden)


def change_logits_from_token_25_on(monkeypatch):
    sample = runner.sample

    def late(logits, picks, state):
        factors = [1.001 if len(picks) > 1 and pick.index >= 24 else 1.0 for pick in picks]
        return sample(logits * mx.array(factors)[:, None], picks, state)

    monkeypatch.setattr(runner, "sample", late)


def accept_draft_tokens_from_the_fourth_on(monkeypatch):
    commit = sched.Scheduler.commit

    def trusting(self, plan, tokens, *rest):
        tokens = [list(row) for row in tokens]
        for decode in plan.decodes:
            tokens[decode.slot][3 : len(decode.draft)] = decode.draft[3:]
        return commit(self, plan, tokens, *rest)

    monkeypatch.setattr(sched.Scheduler, "commit", trusting)


def penalize_what_the_first_of_the_batch_said(monkeypatch):
    apply_penalties = sampling.apply_penalties

    def shared(x, picks, state):
        return apply_penalties(x, [pick._replace(before=picks[0].before) for pick in picks], state)

    monkeypatch.setattr(sampling, "apply_penalties", shared)


def mask_with_the_grammar_of_a_neighbour(monkeypatch):
    mask = sampling.SlotState.mask
    monkeypatch.setattr(
        sampling.SlotState, "mask", lambda self, masks: mask(self, [*masks[1:], *masks[:1]])
    )


@pytest.mark.parametrize(
    "fault, way, questions",
    [
        (hide_rows_from_256_on, "company", [LONG]),
        (change_logits_from_token_25_on, "company", [COUNT]),
        (accept_draft_tokens_from_the_fourth_on, "draft tokens", [COPY]),
        (penalize_what_the_first_of_the_batch_said, "company", [COUNT]),
        # Two answers with grammars must meet: with few questions, now and then none do
        (mask_with_the_grammar_of_a_neighbour, "company", [*verify.QUESTIONS]),
    ],
)
def test_a_planted_fault_is_seen(capsys, monkeypatch, fault, way, questions):
    """The receipt missed each of these: prompts and answers were too short, few draft tokens were
    right, and no answer had penalties or a grammar."""
    if not IS_LONG:
        ask_only(monkeypatch, *questions)
    fault(monkeypatch)
    assert verify.main(["--ways", way]) == 1
    assert " differ, of " in capsys.readouterr().out


def test_planted_order_of_sums_is_found(capsys, count_only, monkeypatch):
    """As a library's does, which has one kernel for few rows and another for many."""
    product = Matrix.__call__

    def in_two_halves(self, x):
        if x.shape[0] < 8:
            return product(self, x)
        half = x.shape[-1] // 2
        near = (verify.device.mx.arange(x.shape[-1]) < half).astype(x.dtype)
        return product(self, x * near) + product(self, x * (1 - near))

    monkeypatch.setattr(Matrix, "__call__", in_two_halves)
    assert verify.main(["--ways", "company"]) == 1
    said = capsys.readouterr().out
    assert "differ, from token " in said
    assert "The first:\n  company: “" in said and "other bits from token " in said


@pytest.mark.skipif(sys.platform != "linux", reason="MLX brings a fast BLAS of its own elsewhere")
def test_another_blas_shows_what_others_have():
    done = run("-c", COUNTING, "--ways", "company", NANOBATCH_BLAS="openblas")
    assert done.returncode == 1
    assert "Nothing is promised here" in done.stdout and "openblas (" in done.stdout
    assert " differ, of 3 answers" in done.stdout
    assert re.search(r"numbers, by up to \S+\. The first:", done.stdout)
    assert "Equal in every bit: none of the ways." in done.stdout


def test_other_threads_are_other_processes(capsys, count_only, monkeypatch):
    """The answers of a process whose product has another number of threads are compared, too."""
    monkeypatch.setattr(verify, "THREADS", ("3",))
    monkeypatch.setattr(
        verify.installation, "start", lambda program: [sys.executable, "-c", COUNTING]
    )
    assert verify.main(["--ways", "threads"]) == 0
    assert "3 answers" in capsys.readouterr().out


def test_incomparable_ways_are_skipped(capsys, count_only, monkeypatch):
    """Such as weights that do not fit the memory when they are widened."""
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
    assert verify.main(["--ways", "widened"]) == 1  # it was 0 where no numbers were compared
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
