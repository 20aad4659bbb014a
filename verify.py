"""Check batch invariance on your machine: the same question gets the same answer, bit by bit, whatever
else runs in the batch.

    python verify.py
    python verify.py --model mlx-community/Llama-3.2-1B-Instruct-4bit
    NANOBATCH_BLAS=libopenblas.so.0 python verify.py   what a product that is not batch-invariant shows

The problem. Many servers claim that temperature 0 gives the same answer each time. But with different
neighbours in the batch, a product of eight rows sums in a different order than one of a single row, and a
token differs. Such a claim is worth little unless everybody can check it.

The solution. Ask some questions alone, one after the other. Then ask each again in many ways: among
neighbours that arrive, finish and are cancelled, in different chunks, with different slots, policies,
threads and weights. Compare the tokens, their log probabilities, and those of the likeliest alternatives. All
of these numbers must be equal to the last bit.

A fault shows only if its code runs. So one answer crosses row 256 and another row 512, and answers have up
to 48 tokens. One question makes the model repeat its prompt, so that draft tokens are accepted for a
while and then rejected. Together the questions use every kind of sampling: greedy, sampled, filtered,
with a bias, with penalties and under two grammars. One prompt is embedded. Neighbours have their own
settings, and log probabilities, because the sampler would otherwise put them in groups of their own.

The invariant: no answer is compared with its own cache. Each way uses a new engine, and only those that
test prefix caching may reuse rows. All random choices have fixed seeds, so a second run makes the same
requests.

Where next: `benchmarks/answer_diff.py`, which compares answers; `kernels/cpu_kernels.c`, whose products
are batch-invariant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from hashlib import file_digest, sha256
from itertools import cycle, islice
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from base import installation, machine
from base.foreign_modules import labelled
from base.sandbox import BusyError
from base.validation import one_line
from benchmarks import answer_hash
from benchmarks.answer_diff import Bits, difference
from benchmarks.random_neighbours import RandomBatch
from cli import options as cli
from distributed import environment
from kernels import device
from models import model_finder
from models.gguf_file import is_gguf, parts_of
from nanobatch import POLICIES, Engine, Handle, SamplingParams
from policies import DEFAULT

EVENING = "One evening, when the lamps were lit and the rain had ended, "
ANIMALS = ", ".join(["owl, cat, fox, bee"] * 3)
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 9}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9},
    "filtered": {"temperature": 1.1, "top_p": 0.9, "min_p": 0.01},
    "bias": {"temperature": 0.9, "logit_bias": {token: token % 5 - 2.0 for token in range(250)}},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "regex": {"grammar": {"regex": "[A-Z][a-z]+( [a-z]{1,12}){14}[.]"}},
    "json": {"temperature": 0.9, "grammar": {"json": NUMBERS}},
    "embedding": {"embeds": True},
}
# Neighbours use these values and biases in place of the questions' own
OTHERS = {"temperature": (0.4, 1.4), "top_p": (0.3, 0.98), "repetition_penalty": (1.05, 1.4)}
BIASES = ({}, {token: 2.0 - token % 4 for token in range(250)}, {32: -3.0, 101: 2.0})
ALPHABET = "Say the alphabet from f."
QUESTIONS = {  # question -> the names of its settings
    "Count from 3 to 12.": "greedy penalties regex",
    "Tell me a story about a fox and a lantern.": "drawn filtered json bias",
    f"Repeat: {ANIMALS}.": "greedy drawn penalties",
    "Tell me a long story about a fox.": "greedy filtered regex",
    ALPHABET: "drawn embedding",
}
ROWS = {"Tell me a long story about a fox.": 240, ALPHABET: 490}  # length of a padded prompt
TOKENS = 48  # per answer; a grammar may end it earlier
LIKELIEST = 10  # alternatives to compare at each position, besides the chosen token
LENGTH = 1024  # tokens per slot
SLOTS = 8
THREADS = ("1", "3")
# Name -> options of the engine whose answers are compared with those of questions asked alone
WAYS: dict[str, dict[str, Any]] = {
    "company": {},  # among neighbours, as in all ways except the last four
    "chunks": {"chunk": 32, "budget": 40},
    "slots": {"slots": 13},
    **{name: {"policy": name} for name in POLICIES if name != DEFAULT},
    "no run-ahead": {"run_ahead": False},
    "prefix_cache": {"prefix_cache": True},
    "slot_cache": {"prefix_cache": True, "slots": 3, "chunk": 32},  # rows restored from disk
    "draft tokens": {"speculate": 15},
    "widened": {"dtype": "float32"},  # for packed weights
    "threads": {},  # separate processes, with 1 thread and with 3
    "prefill": {},  # greedy answers, prefilled as prompts
    "checkpoint": {"prefix_cache": True},  # while another answer to the same prompt is running
    "fork": {"prefix_cache": True},  # while prompts with a common prefix are running
}
OF_STATES = ("checkpoint", "fork")  # only for models with states


class Failed(Exception):
    """A request or a process failed, so nothing can be compared."""


class Case(NamedTuple):
    question: str
    setting: str
    prompt: Any
    sampling: SamplingParams
    alone: Bits | None = None


class Tally(NamedTuple):
    """The result of one way of asking."""

    way: str
    answers: int = 0
    numbers: int = 0
    differ: int = 0  # answers that differ
    place: int = 0  # the first position with different bits, counted from 1
    by: float = 0.0  # the largest difference between two log probabilities of one token
    first: str = ""  # the first difference, as a sentence
    note: str = ""  # a statistic, or why nothing was compared

    def add(self, ask: Case, right: Bits, other: Bits, error: str | None = None) -> Tally:
        sums = self._replace(answers=self.answers + 1, numbers=self.numbers + right.numbers)
        found = difference(right, other)
        if not found:
            return sums
        words = f"it failed: {error}" if error else found.words
        first = f"{self.way}: “{ask.question[-40:]}” ({ask.setting}): {words}"
        place = min(found.place + 1, self.place or math.inf)
        by = max(self.by, found.by)
        return sums._replace(differ=self.differ + 1, place=place, by=by, first=self.first or first)


# --- asking -------------------------------------------------------------------------------------


def asks(engine: Engine) -> list[Case]:
    """Return each question with each of its settings that the model supports."""
    found = []
    for seed, (question, settings) in enumerate(QUESTIONS.items()):
        prompt = lengthened(engine, question)
        for setting in settings.split():
            sampling = settings_of(setting, seed=seed, max_tokens=TOKENS)
            if is_supported(engine, sampling):
                found.append(Case(question, setting, prompt, sampling))
    return found


def settings_of(name: str, **options: Any) -> SamplingParams:
    options = {"logprobs": LIKELIEST} | SETTINGS[name] | options
    return SamplingParams(ignore_eos="grammar" not in options, **options)


def lengthened(engine: Engine, question: str) -> Any:
    """Return the question as a prompt, padded with words of EVENING to its length in ROWS, if any."""

    def prompt(words: int) -> Any:
        return engine.text.ask(" ".join([*islice(cycle(EVENING.split()), words), question]))

    rows = ROWS.get(question, 0)
    numbers = range(2 * rows)
    return prompt(
        bisect_left(numbers, rows, key=lambda n: len(engine.text.encode_prompt(prompt(n))[0]))
    )


def is_supported(engine: Engine, sampling: SamplingParams) -> bool:
    """Return False for a grammar if the grammar library does not support the tokenizer."""
    try:
        return not sampling.grammar or bool(engine.text.grammar(sampling.grammar))
    except (ValueError, BusyError):
        return False


def ended(handle: Handle) -> Bits:
    error = handle.result().error
    if error:
        raise Failed(f"a request failed: {error}")
    return Bits.from_handle(handle)


def load(args: argparse.Namespace, **options: Any) -> Engine:
    arithmetic = {"kv": args.kv, "attention": args.attention, "activations": args.activations}
    return Engine.load(args.model, **{"max_len": LENGTH, "embeds": True} | arithmetic | options)


def ask_alone(args: argparse.Namespace) -> list[Case]:
    with load(args, slots=1, prefix_cache=False, speculate=0) as engine:
        args.activations = 8 if engine.model.arithmetic == "int8" else 32  # the choice of "auto"
        args.has_states = bool(engine.model.config.delta)
        return [
            ask._replace(alone=ended(engine.submit(ask.prompt, ask.sampling)))
            for ask in asks(engine)
        ]


def ask_in_company(engine: Engine, asked: Sequence[Case], dice: random.Random) -> list[Handle]:
    """Ask each question at a random time, among neighbours that arrive, finish and are cancelled.
    Return the handles in the order of the questions."""
    waiting = list(enumerate(asked))
    dice.shuffle(waiting)
    handles: dict[int, Handle] = {}

    def ask() -> Handle:
        number, case = waiting.pop()
        handles[number] = engine.submit(case.prompt, case.sampling, client=dice.choice("ab"))
        return handles[number]

    def meet() -> Handle:
        words = dice.choice([EVENING, *QUESTIONS]).split()
        prompt = " ".join(words[: dice.randint(1, len(words))])
        name = dice.choice(settings)
        own = {field: dice.choice(OTHERS[field]) for field in OTHERS if field in SETTINGS[name]}
        own |= {"seed": dice.getrandbits(31), "max_tokens": dice.randint(1, 40)}
        own["logit_bias"] = dice.choice(BIASES)
        return engine.submit(prompt, settings_of(name, **own), client=dice.choice("ab"))

    settings = sorted({case.setting for case in asked})
    batch = RandomBatch(engine, dice, ask, meet)
    while waiting or batch.open:
        batch.arrive(len(waiting))
        engine.step()
        batch.leave()
    return [handle for _, handle in sorted(handles.items())]


# --- the ways -----------------------------------------------------------------------------------


def compare(args: argparse.Namespace, asked: Sequence[Case]) -> Iterator[Tally]:
    for way in args.ways:
        try:
            yield compare_one(args, way, asked)
        # For instance, widened weights that do not fit in memory
        except (ValueError, BusyError) as error:
            yield Tally(way, note=f"not compared: {one_line(error)}")


def compare_one(args: argparse.Namespace, way: str, asked: Sequence[Case]) -> Tally:
    if way == "threads":
        return compare_threads(args, asked)
    options = {"slots": SLOTS, "prefix_cache": False} | WAYS[way]
    if way == "slot_cache":
        return compare_restored(args, options, asked)
    with load(args, **options) as engine:
        if way == "prefill":
            return compare_prefill(engine, Tally(way), asked)
        tally = Tally(way)
        dice = random.Random(way)
        if way in OF_STATES:
            return compare_beside(engine, tally, asked, dice)
        metrics = []
        for _ in range(args.rounds):
            handles = ask_in_company(engine, asked, dice)
            metrics += [handle.metrics for handle in handles]
            for ask, handle in zip(asked, handles, strict=True):
                tally = tally.add(ask, ask.alone, Bits.from_handle(handle), handle.error)
        if way == "prefix_cache":  # also continue conversations from decoded rows
            tally = compare_prefill(engine, tally, asked)
            reused = f"{sum(m.cached_tokens for m in metrics):,} tokens reused"
            is_from_states = bool(engine.model.config.delta)
            tally = tally._replace(note=reused + ", from checkpoints of states" * is_from_states)
        if way == "draft tokens":
            accepted = sum(m.accepted_tokens for m in metrics)
            drafted = sum(m.draft_tokens for m in metrics)
            tally = tally._replace(note=f"{accepted:,} of {drafted:,} draft tokens accepted")
        return tally


def compare_prefill(engine: Engine, tally: Tally, asked: Sequence[Case]) -> Tally:
    """Compare every seventh decoded token with the first token after a prompt of the tokens before it."""
    for ask in asked:
        if ask.setting != "greedy":  # a sampled token also depends on its position in the answer
            continue
        ids = engine.text.encode_prompt(ask.prompt)[0]
        for place in range(1, len(ask.alone.tokens), 7):
            prompt = [*ids, *ask.alone.tokens[:place]]
            sampling = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=LIKELIEST)
            read = ended(engine.submit(prompt, sampling))
            tally = tally.add(ask, ask.alone.only(place), read)
    return tally


def compare_beside(
    engine: Engine, tally: Tally, asked: Sequence[Case], dice: random.Random
) -> Tally:
    """Start a prompt from a checkpoint of another one that is still running: at the end of that prompt,
    or where the two diverge."""
    running = SamplingParams(max_tokens=2 * TOKENS, ignore_eos=True)
    for ask in asked:
        ids = engine.text.encode_prompt(ask.prompt)[0]
        cut = dice.randint(1, len(ids) - 1)
        forks = [[*ids[:cut], *dice.choices(ids, k=9)] for _ in range(2)]
        others = [
            engine.submit(other, running)
            for other in ([ids] if tally.way == "checkpoint" else forks)
        ]
        while not all(other.tokens for other in others):
            engine.step()
        tally = tally.add(ask, ask.alone, ended(engine.submit(ask.prompt, ask.sampling)))
        for other in others:
            other.cancel()
    counts = engine.snapshot().states
    return tally._replace(
        note=f"{counts.restored:,} prompts from checkpoints, {counts.made:,} made"
    )


def compare_restored(
    args: argparse.Namespace, options: dict[str, Any], asked: Sequence[Case]
) -> Tally:
    """Ask each question again after an earlier engine saved the rows of its prompt and answer."""
    tally = Tally("slot_cache")
    dice = random.Random(tally.way)
    restored = 0
    with TemporaryDirectory() as folder:
        for number in range(1 + args.rounds):
            with load(args, slot_cache=folder, **options) as engine:
                handles = ask_in_company(engine, asked, dice)
                if number:
                    tally = compare_prefill(engine, tally, asked)
            for ask, handle in zip(asked, handles, strict=True):
                tally = tally.add(ask, ask.alone, Bits.from_handle(handle), handle.error)
                if handle.metrics.cached_from == "disk":
                    restored += handle.metrics.cached_tokens
    return tally._replace(note=f"{restored:,} tokens restored from disk")


def compare_threads(args: argparse.Namespace, asked: Sequence[Case]) -> Tally:
    """Ask with different numbers of threads. The number is fixed per process, so start a process for each."""
    if device.has_gpu() or device.blas.name != "rows":
        raise ValueError("threads are counted for our own product")
    tally = Tally("threads", note=f"{' and '.join(THREADS)} in place of the usual")
    for threads in THREADS:
        command = [*installation.start("verify.py"), "--model", args.model, "--answers"]
        command += ["--kv", args.kv, "--attention", args.attention]
        command += ["--activations", str(args.activations)]
        environment = os.environ | {"NANOBATCH_THREADS": threads}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
        if done.returncode:
            raise Failed(
                f"the process with NANOBATCH_THREADS={threads} exited with {done.returncode}"
            )
        for ask, again in zip(asked, pickle.loads(done.stdout), strict=True):
            tally = tally.add(ask, ask.alone, again)
    return tally


# --- the receipt --------------------------------------------------------------------------------


def hash_of(model: str) -> str:
    """Return a hash of the files that determine a model's answers."""
    folder = model_finder.find(model)
    digest = sha256()
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    for path in sorted(parts_of(folder) if is_gguf(folder) else files):
        with path.open("rb") as file:
            digest.update(f"{path.name} {file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def hash_of_the_demo() -> str:
    """Return the fingerprint of the demo's answers, compared with the expected one."""
    with Engine.load("demo", max_len=LENGTH) as engine:
        return answer_hash.compared(answer_hash.fingerprint(engine), device.mx.__version__)


def receipt(
    args: argparse.Namespace, asked: Sequence[Case], tallies: Sequence[Tally]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "model_sha256": hash_of(args.model),
        "activations": args.activations,
        "processor": machine.processor(),
        "product": labelled(device.named()),
        "promises": device.is_batch_invariant(),
        "version": installation.version(),
        "demo": hash_of_the_demo(),
        "answers": sum(tally.answers for tally in tallies),
        "numbers": sum(tally.numbers for tally in tallies),
        "settings": sorted({ask.setting for ask in asked}),
        "differ": sum(tally.differ for tally in tallies),
        "by": max((tally.by for tally in tallies), default=0.0),
        "first": next((tally.first for tally in tallies if tally.first), ""),
        "answers_sha256": sha256(" ".join(ask.alone.digest for ask in asked).encode()).hexdigest(),
        "ways": [tally._asdict() for tally in tallies],
    }


def shown(found: dict[str, Any]) -> Iterator[str]:
    compared = f"{found['answers']:,} answers, {found['numbers']:,} numbers"
    if found["differ"]:
        yield f"{found['differ']:,} differ, of {compared}, by up to {found['by']:.1g}. The first:"
        yield f"  {found['first']}"
        same = [way["way"] for way in found["ways"] if way["answers"] and not way["differ"]]
        yield f"  Equal in every bit: {', '.join(same) or 'none of the ways'}."
    elif found["numbers"]:
        yield f"Not one bit differs: {compared}."
    else:
        yield "No numbers were compared, so nothing is known."
    if not found["promises"]:
        yield "  Nothing is promised here: this product may sum in another order when the batch changes."
    yield f"  model      {found['model']}, sha256 {found['model_sha256'][:16]}"
    yield f"  product    {found['product']}; activations of {found['activations']} bits"
    yield f"  processor  {found['processor']}"
    yield f"  version    {found['version']}"
    yield f"  settings   {', '.join(found['settings'])}"
    yield f"  demo       {found['demo']}"
    yield f"  answers    sha256 {found['answers_sha256'][:16]}"


def line(tally: Tally) -> str:
    note = f"   {tally.note}" if tally.note else ""
    if not tally.answers:
        return f"  {tally.way:<14}{note}"
    counts = f"{tally.answers:>4} answers {tally.numbers:>8,} numbers {tally.differ:>5,} differ"
    counts += f", from token {tally.place}, by up to {tally.by:.1g}" if tally.differ else ""
    return f"  {tally.way:<14}{counts}{note}"


# --- the program --------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    says = "Does an answer keep its bits whatever else runs in the batch? Try it here."
    parser = cli.CommandLine("verify.py", description=says)
    add = parser.add_argument
    parser.add_model()
    parser.add_activations()
    says = f"which to try (default: {','.join(WAYS)}; the last two with states)"
    add("--ways", help=says)
    says = "how many times each question is asked among others (default: 1)"
    parser.add_whole("--rounds", 1, 1000, says, default=1)
    parser.add_attention()
    add("--json", action="store_true", help="write the receipt as JSON")
    # Only print the answers, for `compare_threads`
    add("--answers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.ways = args.ways and args.ways.split(",")
    for way in args.ways or ():
        if way not in WAYS:
            parser.error(f"--ways: {way!r} is unknown; choose among {','.join(WAYS)}")
    if environment.backend():
        parser.error("engines of one process are compared; start this without mpirun or mlx.launch")
    return args


def verify(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    began = time.perf_counter()
    asked = ask_alone(args)
    args.ways = args.ways or [way for way in WAYS if args.has_states or way not in OF_STATES]
    rounded = "; activations of 8 bits" * (args.activations == 8)
    say(f"nanobatch: {args.model}; {labelled(device.named())}{rounded}")
    say(
        f"{len(asked)} answers of up to {TOKENS} tokens alone, in one slot. In company, or in "
        "other ways:"
    )
    tallies = []
    for tally in compare(args, asked):
        say(line(tally))
        tallies.append(tally)
    return receipt(args, asked, tallies) | {"seconds": round(time.perf_counter() - began, 1)}


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        if args.answers:
            sys.stdout.buffer.write(pickle.dumps([ask.alone for ask in ask_alone(args)]))
            return 0
        out = sys.stderr if args.json else sys.stdout
        found = verify(args, lambda text: print(text, file=out, flush=True))
    except (ValueError, Failed) as error:
        cli.say(one_line(error))
        return 2
    print(json.dumps(found, indent=1) if args.json else "\n".join(shown(found)))
    return 1 if found["differ"] or not found["numbers"] else 0


if __name__ == "__main__":
    cli.run(main)
