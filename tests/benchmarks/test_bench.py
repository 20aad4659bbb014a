"""The benchmark: its metrics for given times, its loop on a simulated clock, and a tiny run of each part."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from checkpoints import make_checkpoint
from processes import python, run
from waiting import wait_for

import bench
from benchmarks import driver, quality
from benchmarks.dictated_model import DictatedModel, texts
from benchmarks.driver import Failure, Sample, take_all
from benchmarks.metrics import (
    Delivery,
    closed_figures,
    decode_figures,
    long_figures,
    step_figures,
)
from benchmarks.peers import PEERS, News, TimedRequest, obstacle
from benchmarks.plan import (
    CROWD,
    PARTS,
    PARTS_OF_A_PEER,
    SHAPES,
    Contestant,
    Setup,
    Spec,
    crowd_lengths,
    make_model,
    make_plan,
    our_column,
    read_rival,
)
from benchmarks.report import cell_text, show, summarise
from docs.make import plot
from engine.snapshot import StepView
from kernels import device
from kernels.device import mx
from models.load import read_model
from models.model_finder import find
from nanobatch import Engine, Tokenizer

BENCH = Path(__file__).parents[2] / "bench.py"


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> Spec:
    folder = make_checkpoint(tmp_path_factory.mktemp("bench"), seed=1)
    return Spec("", "nanobatch continuous", str(folder), 272, rows=2, prompt=8, output=4)


# --- metrics ------------------------------------------------------------------------------------


def test_decode_counts_full_batches_only():
    """A starts at 1 and B at 3. Neither A's tokens before 3 nor B's tokens after A's last one count.

    A  1 2 3 4 5        after 3: A at 4 and 5, B at 4 and 5: four tokens in two seconds
    B      3 4 5 6 7
    """
    a, b = Delivery(0, [1, 2, 3, 4, 5]), Delivery(0, [3, 4, 5, 6, 7])
    assert decode_figures([a, b], 2) == {"decode tokens/s": 2, "prefill ms": 3000}
    assert decode_figures([a, b], 9)["decode tokens/s"] == 2, "the first end is the end"


def test_rows_that_never_overlap_are_refused():
    with pytest.raises(ValueError, match="longer --output"):
        decode_figures([Delivery(0, [1, 2]), Delivery(0, [3, 4])], 2)


def test_figures_of_a_closed_loop():
    """Two consecutive requests of five tokens take 5 s each, with 1 s to the first token."""
    answers = [Delivery(0, [1, 2, 3, 4, 5]), Delivery(5, [6, 7, 8, 9, 10])]
    figures = closed_figures(answers, users=1)
    assert figures["decode tokens/s"] == 1 and figures["total tokens/s"] == 1
    assert figures["TTFT mean ms"] == figures["TTFT p99 ms"] == figures["gap max ms"] == 1000


def test_gaps_before_and_after_a_long_prompt():
    """The long prompt arrives at 4.5 and has its first token at 8.5. Before it arrives, the row's gaps are 1
    s, then 1, 3 and 1 s."""
    row = Delivery(0, [1, 2, 3, 4, 5, 8, 9, 10])
    figures = long_figures([row], late=Delivery(4.5, [8.5]), alone=Delivery(0, [2]))
    assert figures["gap undisturbed ms"] == 1000 and figures["gap p95 ms"] == 3000
    assert figures["gap p95 / undisturbed"] == 3 and figures["TTFT / alone"] == 2


def test_step_time_is_its_period():
    def step(number: int) -> StepView:
        stages = {"plan_s": 0.1, "build_s": 0.4, "device_s": 0.6, "wait_s": 0.8, "commit_s": 0.2}
        empty = [()] * 7
        span = {"began": number - 0.5, "ended": number}
        return StepView(number, *empty, 0, "", 0, 0, **span, **stages)

    figures = step_figures([step(1), step(2), step(3)])
    assert figures["step ms"] == 1000 and figures["wait ms"] == 800 and figures["device ms"] == 600
    assert figures["python ms"] == pytest.approx(700)
    assert figures["plan ms"] == 100 and figures["commit ms"] == 200


# --- the loop -----------------------------------------------------------------------------------


class Clockwork:
    """A contestant with its own clock: each step takes a second and gives one token to each of the `rows`
    oldest requests."""

    def __init__(self, rows: int):
        self.rows, self.now, self.left = rows, 0.0, {}

    def submit(self, ask: TimedRequest) -> int:
        self.left[len(self.left)] = ask.max_tokens
        return len(self.left) - 1

    def step(self) -> list[News]:
        self.now += 1
        came = [key for key, left in self.left.items() if left][: self.rows]
        for key in came:
            self.left[key] -= 1
        return [(key, [7], not self.left[key]) for key in came]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def drive(self, asks: list[TimedRequest], users: int | None = None) -> list[Delivery]:
        return driver.drive(self, asks, users, clock=lambda: self.now, sleep=self.sleep)


def test_processor_clock(spec):
    """The processor clock excludes time in which another program runs. Here the engine sleeps, which only the
    wall clock measures."""
    rates = {}
    for clock in ("wall", "processor"):
        sample = Sample(spec._replace(part="decode", rows=1, clock=clock))
        step = sample.contestant.engine.step
        sample.contestant.engine.step = lambda step=step: (time.sleep(0.1), step())
        rates[clock] = sample.decode()["decode tokens/s"]
        sample.contestant.close()
    assert rates["wall"] < 10 < rates["processor"]


def test_closed_loop():
    answers = Clockwork(rows=2).drive([TimedRequest([1], 2)] * 3, users=1)
    assert [a.sent for a in answers] == [0, 2, 4]
    assert [a.times for a in answers] == [[1, 2], [3, 4], [5, 6]]


def test_open_loop_waits_from_the_due_time():
    """The second request is due at 0.5, in the middle of a step, and the row is busy until 2. Its waiting
    time starts at 0.5."""
    answers = Clockwork(rows=1).drive(
        [TimedRequest([1], 2), TimedRequest([1], 1, at=0.5), TimedRequest([1], 1, at=9)]
    )
    assert [a.sent for a in answers] == [0, 0.5, 9]
    assert [a.times for a in answers] == [[1, 2], [3], [10]], "nobody is sent before he is due"


# --- the output ---------------------------------------------------------------------------------


def test_table_cell():
    ours = "nanobatch continuous"
    rates = [(ours, 90), (ours, 150), (ours, 110), ("mlx-lm", 100), ("llama.cpp", 220)]
    row = {"part": "decode", "x": "rows 8"}
    table = summarise(
        row | {"contestant": who, "figures": {"decode tokens/s": rate}} for who, rate in rates
    )
    key = "decode", "rows 8", "decode tokens/s"
    assert cell_text((*key, ours), table) == "110 (90.0–150)"
    assert cell_text((*key, "mlx-lm"), table) == "100 ×0.91"
    assert cell_text((*key, "llama.cpp"), table) == "220 ×2.00"
    assert cell_text((*key, "nobody"), table) == ""


def test_decode_is_compared_with_what_memory_yields(spec, capsys):
    """A line below the table compares our own product's GB/s with the memory's, on the wall clock."""
    sample = Sample(spec._replace(part="decode", rows=1))
    with closing(sample.contestant):
        figures = sample.decode()
    record = {"part": "decode", "x": "rows 1", "contestant": "nanobatch continuous"}
    record["figures"] = figures | {"GB/s read": 27.7, "GB/s of all threads": 31.8}
    show({"command": "", "machine": {}, "records": [record]})
    assert figures["GB/s read"] > 0 and figures["GB/s of one thread"] > 0.1
    shown = capsys.readouterr().out
    assert "rows 1, nanobatch continuous: 27.7 GB/s read, 87% of 31.8 (one thread:" in shown
    assert "GB/s of all threads" not in shown


def plan_of(spec: Spec, part: str, vs: str = "") -> list[Setup]:
    rivals = [read_rival(name, "continuous") for name in vs.split(",") if name]
    return make_plan([part], [8], spec, our_column("continuous"), rivals)


def test_columns_take_turns(spec, monkeypatch):
    order = []

    def measure(spec: Spec, column: Contestant) -> dict:
        order.append(column.name.split()[0])
        return {"figures": {"total tokens/s": 100}}

    monkeypatch.setattr(driver, "measure", measure)
    plan = plan_of(spec, "decode", vs="mlx-lm,llama.cpp")
    records = []
    list(take_all(plan, 3, records, report=lambda stage: None))
    there = ["nanobatch", "mlx-lm", "llama.cpp"]
    assert order == [*there, *reversed(there), *there]
    assert len(records) == 9


def test_load_is_relative_to_static(spec, monkeypatch):
    rates = {}
    capacity = 200  # tokens per second

    def measure(spec: Spec, column: Contestant) -> dict:
        rates.setdefault(spec.rate, []).append(column.name)
        return {"figures": {"total tokens/s": capacity if "static" in column.name else 999}}

    monkeypatch.setattr(driver, "measure", measure)
    list(take_all(plan_of(spec, "open", vs="mlx-lm"), 1, [], report=lambda stage: None))
    mean = sum(crowd_lengths(256)) / CROWD
    assert list(rates) == pytest.approx(
        [float("inf"), *(load * capacity / mean for load in (0.4, 0.6, 0.8, 1.0, 1.2))]
    )
    assert all(len(set(who)) == 4 for who in rates.values()), "everybody meets the same arrivals"


# --- what is measured, and where ----------------------------------------------------------------


ANOTHER_VERSION = """
import json, os, sys
spec = json.loads(sys.argv[sys.argv.index("--sample") + 1])
said = {"spec": spec, "at": os.getcwd(), "BLAS": os.environ.get("NANOBATCH_BLAS")}
with open("said", "a") as file:
    print(json.dumps(said), file=file)
print(json.dumps({"figures": {"decode tokens/s": 1.0}}))
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout of another version, whose samples record their spec, folder and BLAS."""
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "bench.py").write_text(ANOTHER_VERSION)
    return folder


def test_other_checkout_runs_its_own_bench(spec, checkout, monkeypatch):
    """Only fields that differ from their defaults are sent, because older versions do not know all of them."""
    monkeypatch.setenv("NANOBATCH_BLAS", "mine")
    plan = plan_of(spec, "decode", vs=f"{checkout},{checkout}@rows:avx2")
    setup = plan[0]._replace(columns=plan[0].columns[1:])
    records = []
    list(take_all([setup], 1, records, report=lambda stage: None))
    assert [r["contestant"] for r in records] == [str(checkout), f"{checkout}@rows:avx2"]
    assert all(r["figures"] == {"decode tokens/s": 1.0} for r in records)
    plain, other = map(json.loads, (checkout / "said").read_text().splitlines())
    assert plain["BLAS"] == "mine" and other["BLAS"] == "rows:avx2"
    assert checkout.samefile(plain["at"])
    assert plain["spec"]["contestant"] == "nanobatch continuous"
    fields = "part contestant folder vocabulary rows prompt output"
    assert list(plain["spec"]) == fields.split()


def test_numpy_is_needed_for_quality_alone():
    """Regression: `nanobatch bench` failed with a traceback if numpy, which is installed only with the extras
    for tests and peers, was missing."""
    code = "import sys; sys.modules['numpy'] = None; import bench; bench.parse_arguments({})"
    assert python(code.format([])).returncode == 0
    done = python(code.format(["--parts", "quality"]))
    assert done.returncode == 2 and "; run pip install numpy" in done.stderr, done.stderr


def test_other_checkout_lacks_a_part(spec, checkout):
    (checkout / "bench.py").write_text("raise AttributeError('no such part')")
    with pytest.raises(Failure, match=r"before ended with code 1: AttributeError: no such part"):
        driver.measure(spec, read_rival(str(checkout), "continuous"))


def test_columns_of_each_part(spec, checkout):
    """A peer is measured in the parts that it supports, and another checkout in all of them."""
    columns = {part: plan_of(spec, part, vs=f"mlx-lm,{checkout}")[0].columns for part in PARTS}
    names = {
        part: [column.name.replace(str(checkout), "before") for column in columns[part]]
        for part in columns
    }
    assert names["decode"] == ["nanobatch continuous", "mlx-lm", "before"]
    assert names["steps"] == ["nanobatch continuous", "before"]
    assert names["open"] == [
        *(f"nanobatch {policy}" for policy in ("continuous", "static", "serial")),
        "mlx-lm",
        "before",
    ]
    assert names["same"] == ["mlx-lm"]
    assert names["speculate"] == ["nanobatch continuous", "nanobatch continuous, speculate auto"]


def test_dictated_answers(tmp_path):
    """The answers are the same with and without draft tokens."""
    folder = make_checkpoint(tmp_path)
    parts = read_model(folder), Tokenizer(folder, 272)
    said = []
    for speculate in (0, 3):
        with Engine(*parts, slots=2, max_len=512, speculate=speculate) as engine:
            dictation = DictatedModel(engine)
            wishes = [text for text, _ in zip(texts("rewrite", 272), range(2), strict=False)]
            handles = [dictation.submit(text) for text in wishes]
            assert [handle.result().tokens for handle in handles] == [t.answer for t in wishes]
            said.append(engine.registry.steps.count)
    assert said[1] < 0.6 * said[0], said


# --- a small run of each part -------------------------------------------------------------------

SMALL = {
    "decode": {},
    "closed": {},
    "open": {"rows": 8, "output": 2, "rate": 5000.0},
    "steps": {"output": 8},
    "long": {"rows": 3, "output": 24, "late": 100},
    "chat": {"rows": 1, "prompt": 40, "length": 240},
    "speculate": {"rows": 2, "text": "rewrite fresh", "length": 480},
    "same": {"output": 8},
}


@pytest.mark.parametrize(
    "part, who",
    [
        (part, who)
        for part in PARTS
        for who in ("nanobatch continuous", *PEERS)
        if who not in PEERS or part in PARTS_OF_A_PEER
    ],
)
def test_small_sample_of_each_part(spec, part, who):
    if who in PEERS and obstacle(who):
        pytest.skip(
            obstacle(who)
        )  # llama.cpp would have to be compiled; tests/benchmarks/test_peers.py has a stand-in for it
    speculate = "3" if part == "speculate" else "0"
    sample = Sample(spec._replace(part=part, contestant=who, speculate=speculate, **SMALL[part]))
    figures = getattr(sample, part)()
    sample.contestant.close()
    assert figures and all(value > 0 for value in figures.values()), figures


def test_chat_compares_equal_numbers_of_tokens(spec):
    """Turns have 40 new tokens and answers 4, so the fifth prompt has 216 tokens. A chunk at row 128 has 41
    new ones."""
    sample = Sample(spec._replace(part="chat", **SMALL["chat"]))
    with closing(sample.contestant):
        turn = sample.last_turn()
        chunk = sample.lone_chunk()
    assert turn.prompt_tokens == 216
    assert (chunk.prompt_tokens, chunk.cached_tokens) == (128 + 41, 128)


def test_run_is_shown_and_plotted_again(spec, tmp_path, capsys):
    """Regression: a benchmark of minutes printed nothing if its standard error was not a terminal, and
    seemed to hang."""
    data = tmp_path / "run.json"
    picture = tmp_path / "run.svg"
    words = (
        f"--parts decode --prompt 8 --output 4 --samples 1 --rows 2 --vs mlx-lm@off --json {data}"
    )
    measured = run("bench.py", "--model", spec.folder, *words.split())
    assert measured.returncode == 0, measured.stderr
    progress = r"nanobatch: {} of 2 after \d+ s: decode, rows 2, {}"
    first, second = measured.stderr.splitlines()
    assert re.fullmatch(progress.format(1, "nanobatch continuous"), first)
    assert re.fullmatch(progress.format(2, "mlx-lm@off"), second)
    assert bench.main(["--from", str(data)]) == 0 and capsys.readouterr().out == measured.stdout
    written = json.loads(data.read_text())
    assert {"processor", "version", "mlx-lm", "device", "commit"} <= written["machine"].keys()
    assert [r["contestant"] for r in written["records"]] == ["nanobatch continuous", "mlx-lm@off"]
    if sys.platform == "linux":  # elsewhere MLX has its own fast BLAS
        assert re.search(r"BLAS mlx +┃", measured.stdout), measured.stdout
    assert plot.main([str(data), str(picture)]) == 0
    texts = [element.text for element in ElementTree.parse(picture).findall(".//{*}text")]
    assert {"decode tokens/s, by rows", "nanobatch continuous", "mlx-lm@off"} <= set(texts)


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Callable[[int], Spec]:
    """Register the shape `tiny`. Return a function that makes a model and a spec of it for a number of bits."""
    monkeypatch.setitem(SHAPES, "tiny", (64, 1, 2, 1, 128, 300))

    def of_bits(bits: int) -> Spec:
        folder = str(make_model(tmp_path, "tiny", bits))
        return Spec("decode", "nanobatch continuous", folder, 300, rows=2, prompt=4, output=3)

    return of_bits


@pytest.mark.parametrize("who", ["nanobatch serial", "mlx-lm"])
def test_a_shape_makes_a_model_that_both_can_read(tiny, who):
    with closing(Sample(tiny(32)._replace(contestant=who)).contestant) as contestant:
        assert driver.drive(contestant, [TimedRequest([1], 2)])[0].tokens


@pytest.mark.parametrize("bits", [4, 16])
def test_packed_shape_against_widened(tiny, bits):
    """Test `--bits 4 --vs widened` and `--bits 16 --vs widened`."""
    forms = []
    for column in (our_column("continuous"), read_rival("widened", "continuous")):
        sample = Sample(tiny(bits)._replace(dtype=column.dtype))
        assert sample.decode()["decode tokens/s"] > 0
        forms.append(sample.contestant.engine.model.cost.form)
        sample.contestant.close()
    narrow = "bfloat16" if bits == 16 else f"{bits} bits in groups of 64"
    wide = "float32, widened"
    assert forms == [narrow if device.is_batch_invariant() else wide, wide]


def test_kv_and_attention_reach_the_engine(tiny):
    for kv, attention in (("auto", "auto"), ("float32", "plain")):
        sample = Sample(tiny(4)._replace(kv=kv, attention=attention))
        engine = sample.contestant.engine
        assert engine.runner.slab.dtype == (mx.float16 if kv == "auto" else mx.float32)
        is_fused = attention == "auto" and device.is_batch_invariant()
        assert engine.model.attention == ("c" if is_fused else "formula")
        sample.contestant.close()


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--rows", "1,0"], ["--rows", "'0'", "from 1 to 1,024"]),
        (["--output", "1"], ["--output", "'1'", "from 2 to"]),
        (["--samples", "many"], ["--samples", "'many'", "whole number"]),
        (["--parts", "decode,cold"], ["'cold'", "speculate"]),
        (["--vs", "vllm"], ["vllm", "mlx-lm", "llama.cpp", "folder"]),
        (["--vs", "mlx-lm,"], ["''", "folder"]),
        (["--vs", "docs"], ["'docs'", "holds a bench.py"]),
        (["--vs", "llama.cpp@off"], ["its own matrix product", "@'off'"]),
        (["--parts", "same"], ["same", "--vs mlx-lm", "--vs llama.cpp"]),
        (["--clock", "processor", "--parts", "decode,open"], ["--clock", "leave open out"]),
        (["--shape", "70b"], ["70b", "1b"]),
        (["--model", "demo", "--shape", "15m"], ["mutually exclusive"]),
        (["--shape", "15m", "--bits", "3"], ["--bits", "3", "4, 8, 16"]),
        (["--bits", "4"], ["--bits 4", "--shape"]),
        (["--json", "/dev/null/run.json"], ["/dev/null/run.json", "name a file"]),
        (["--colour"], ["--colour"]),
    ],
)
def test_wrong_option_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(arguments)
    line = capsys.readouterr().err
    assert exit.value.code == 2 and line.count("\n") == 1
    assert all(word in line for word in words), line


@pytest.mark.parametrize("content", [None, b"", b"[1, 2]", b'{"records": [{}]}', b"\xff"])
def test_a_file_that_holds_no_run_gets_one_line(content, tmp_path, capsys):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    assert bench.main(["--from", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and str(path) in line and "name a file that --json wrote" in line
    assert plot.main([str(path), str(tmp_path / "run.svg")]) == 1
    assert capsys.readouterr().err.removeprefix("docs/make/plot.py: ") in line
    assert not (tmp_path / "run.svg").exists()


def test_failing_sample_is_one_line(spec, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    assert bench.main(["--model", spec.folder + "/config.json"]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="would fit"):
        driver.measure(spec._replace(part="steps", length=2**30), our_column("continuous"))


def test_long_prompts_overlap(spec):
    """Regression: late in a prompt, chunks are narrow, so the first answer had ended before the last prompt
    was prefilled."""
    sample = Sample(spec._replace(part="steps", rows=4, prompt=900, output=2))
    with closing(sample.contestant):
        steps = sample.decode_steps()
    assert len(steps) >= 2 and all(len(step.decode) == 4 for step in steps)


def test_ctrl_c_ends_the_sample_too(spec, background_job):
    """The signal reaches only the benchmark, as if another program had sent it. The benchmark ends its child,
    too."""
    command = [sys.executable, str(BENCH), "--parts", "decode", "--output", "100000"]
    process = subprocess.Popen(
        [*command, "--model", spec.folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Suppress the line about a missing fast BLAS
        env=os.environ | {"NANOBATCH_BLAS": "off"},
        preexec_fn=background_job,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.parent.exists():
        process.kill()
        pytest.skip("no /proc here")

    def sampling() -> list[str]:
        assert process.poll() is None
        return [pid for pid in children.read_text().split() if "--sample" in line_of(pid)]

    samples = wait_for(sampling)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (stdout, process.returncode) == ("", 130)
    assert re.fullmatch(
        r"nanobatch: 1 of \d+ after \d+ s: decode, rows 1, nanobatch continuous\n", stderr
    ), stderr
    # The child may still be importing the code that notices the exit
    wait_for(lambda: not line_of(samples[0]))


def line_of(pid: str) -> str:
    """Return a process's command line, or "" if the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_steps_on_a_gpu_are_timed_with_the_wait_and_without(spec, monkeypatch):
    """On a GPU both timings are needed to decide whether to wait for the previous pass (`Runner._start`)."""
    monkeypatch.setattr("kernels.device.is_gpu", True)
    sample = Sample(spec._replace(part="steps", output=8))
    with closing(sample.contestant):
        figures = sample.steps()
    for way in ("waiting", "not waiting"):
        assert figures[f"{way}: tokens/s"] > 0 and figures[f"{way}: peak MB"] > 0


def test_quality_does_not_depend_on_the_chunks(monkeypatch, capsys):
    """Chunks of 50 and of 25 tokens give the same perplexity: each starts in the right row, and attends only
    to rows of its span."""
    folder = find("demo").absolute()
    monkeypatch.setattr(quality, "SPAN", 100)
    tables = []
    for chunk in (50, 25):
        monkeypatch.setattr(quality, "CHUNK", chunk)
        monkeypatch.setattr(quality, "obstacle", lambda peer: "not in this test")
        quality.show(folder, tokens=200)
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and tables[0].count("|\n") == 4
    assert "| `--activations 32` | " in tables[0] and "100.0% |" in tables[0]


def test_perplexity_of_equal_logits_is_their_number():
    found = quality.Quality.from_logits(np.zeros((3, 16), np.float32), np.array([0, 5, 15]))
    assert np.exp(found.nll).tolist() == pytest.approx([16, 16, 16])
