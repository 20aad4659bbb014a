"""An engine of words for the tests of the screen: the real engine and scheduler with no model and a simulated clock.

A decode step takes 10 ms and a chunk of a prompt 5. Every answer has max_tokens words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from distributed.group import ALONE
from kernels.device import mx
from models.config import Config
from models.forward_cost import ModelCost
from models.rope import Rope
from nanobatch import Engine
from policies import POLICIES
from runner import ForwardBatch, SamplingRows
from sched import Scheduler
from step_output import StepOutput, TokenLogprob
from text.tokenizer import Prompt

STORY = (
    "once upon a time there was a fox who looked for the moon",
    "in every pond that she could find",
)
STORY = " ".join(STORY).split()
BEYOND = sys.maxunicode + 1  # tokens of answers begin after the last character


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def speak(prompt: str, index: int) -> str:
    """Return the answer's piece at this index. It echoes quoted text, so that a test can put anything on
    the screen; otherwise it tells a story."""
    if '"' in prompt:
        return prompt.split('"')[1][4 * index : 4 * (index + 1)]
    return " " * (index > 0) + STORY[index % len(STORY)]


class WordText:
    """A tokenizer with one token for each character of a prompt. An answer's tokens are numbers in `pieces`,
    after all characters.

    No prompt can therefore continue an answer, and the rows of an answer are never reused.
    """

    has_template, end_tokens = False, frozenset()
    folder = Path("no folder")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.numbers: dict[str, int] = {}  # piece -> token

    def token(self, piece: str) -> int:
        """Return the token of a piece, always the same one."""
        if piece not in self.numbers:
            self.numbers[piece] = BEYOND + len(self.pieces)
            self.pieces.append(piece)
        return self.numbers[piece]

    def ask(self, text: str) -> list[int]:
        return list(map(ord, text))

    def encode_prompt(self, prompt: Prompt | Sequence[int]) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        return Prompt(tuple(prompt), f"{len(prompt)} token ids")

    def check_ids(self, ids: Sequence[int]) -> None:
        pass

    def grammar(self, source: object) -> None:
        raise ValueError("words have no grammar")

    def stream(self, stops: Sequence[str]) -> WordStream:
        return WordStream(self.pieces, min((int(stop.strip("<>")) for stop in stops), default=None))


class WordStream:
    """A stream that decodes tokens to words. The stop string "<9>" ends an answer after nine of them."""

    def __init__(self, pieces: Sequence[str], left: int | None):
        self.pieces = pieces
        self.left = left

    def push(self, token: int) -> str:
        if self.left is not None:
            self.left -= 1
        return self.pieces[token - BEYOND]

    def finish(self, tokens: Sequence[int]) -> str:
        return ""

    @property
    def stop(self) -> str | None:
        return "" if self.left is not None and self.left <= 0 else None


@dataclass
class WordFlight:
    runner: WordRunner
    tokens: list[list[int]]
    began: float
    cost: float
    device_s: float
    finite: list[int]
    outputs: dict[tuple[int, int], StepOutput] = field(default_factory=dict)
    ended: float | None = None
    build_s: float = 0.001
    wait_s: float = 0.0

    def read_back(self) -> tuple[list[list[int]], dict]:
        if self.ended is None:
            self.runner.time.now += self.cost
            self.ended = self.runner.time.now
        return self.tokens, self.outputs


class WordRunner:
    """The device. It runs one step at a time: starting a step waits for the previous one."""

    def __init__(self, time: Clock, clock: Callable[[], float], slots: int, text: WordText):
        self.time, self.clock, self.text, self.slots = time, clock, text, slots
        self.fail: Exception | None = None  # what the next step raises
        self.reset()

    slab = None

    def reset(self) -> None:
        self.prompts = [""] * self.slots
        self.flight: WordFlight | None = None

    def start_forward(self, order: ForwardBatch) -> WordFlight:
        if self.fail:
            error, self.fail = self.fail, None
            raise error
        began = self.clock()
        if self.flight:
            self.flight.read_back()
        for chunk in order.prefills:
            held = self.prompts[chunk.slot if chunk.copied_from is None else chunk.copied_from]
            self.prompts[chunk.slot] = held[: chunk.start] + "".join(map(chr, chunk.ids))
        tokens = [[-1] for _ in range(self.slots)]
        cost = 0.01 * bool(order.decodes) + 0.005 * len(order.prefills)
        device_s = max(0.0, self.clock() - began - 0.001)
        finite = [chunk.slot for chunk in order.prefills if not chunk.emits]
        self.flight = WordFlight(self, tokens, began, cost, device_s, finite)
        return self.flight

    def says(self, slot: int, index: int) -> int:
        return self.text.token(speak(self.prompts[slot], index))

    def start_sampling(self, flight: WordFlight, picks: SamplingRows) -> WordFlight:
        for slot, rows in picks.items():
            flight.tokens[slot] = []
            for pick in rows:
                said = self.says(slot, pick.index)
                flight.tokens[slot].append(said)
                if pick.sampling.logprobs is not None:
                    entry = TokenLogprob(-0.25, ((said, -0.25),))
                    flight.outputs[slot, pick.index] = StepOutput(said, entry)
        return flight


NO = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": "", "window": None}
CONFIG = Config(
    "words", 1, 8, 1, 1, 8, 8, 2**21, 1e-6, 4096, tied=True, rope=Rope("default", 1e4), **NO
)

VIEW = ModelCost(
    form="float32",
    layers=4,
    body_nbytes=60_000_000,
    body_products=15_000_000,
    tail_nbytes=4_000_000,
    tail_products=1_000_000,
    token_nbytes=1024,
    row_nbytes=8192,
    last_row_nbytes=2048,
    width=1024,
    last_width=256,
)


def word_engine(
    clock: Clock, time: Clock, slots: int = 8, max_len: int = 512, policy: str = "continuous"
) -> Engine:
    text = WordText()
    nothing = {"layers": (), "norm": None, "table": None, "head": None, "layer_inputs": None}
    dtypes = {"dtype": mx.float32, "kv_dtype": mx.float32, "has_narrow_kv": False}
    model = SimpleNamespace(
        config=CONFIG,
        is_float32=True,
        ranks=ALONE,
        cost=VIEW,
        arithmetic="float",
        **dtypes,
        **nothing,
    )
    runner = WordRunner(time, clock, slots, text)
    engine = Engine(
        model, text, slots=slots, max_len=max_len, clock=clock, runner=runner, speculate=0
    )
    engine.eager_first_token = False
    engine.sched = Scheduler(slots, max_len, POLICIES[policy], chunk=16, budget=32)
    return engine
