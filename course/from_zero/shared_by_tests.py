"""Helpers of the stages' tests: the demo model, engines, scheduler stories, and comparisons."""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from zlib import crc32

from harness import check
from scheduler_story import Story, timeline

import kv
import llama
from course.from_zero import small_llama
from kernels.device import mx
from models.load import read_model
from models.memory import slab_shape
from models.model_finder import DEMO
from nanobatch import Engine, Handle, SamplingParams
from request import Request
from text.tokenizer import Tokenizer

SEED = os.environ.get("NANOBATCH_SEED", "")  # a student's name, to vary shapes, numbers and prompts


def varied(*choices):
    """Return the first choice; with a seed, a random one."""
    return random.Random(f"{SEED} {choices}").choice(choices) if SEED else choices[0]


SUM, SAID = varied(
    ("What is 17 + 6?", "7 + 6 = 13, so 17 + 6 = 23."),
    ("What is 28 + 7?", "8 + 7 = 15, so 28 + 7 = 35."),
    ("What is 36 + 9?", "6 + 9 = 15, so 36 + 9 = 45."),
    ("What is 45 + 8?", "5 + 8 = 13, so 45 + 8 = 53."),
)
ANSWERS = {
    SUM: SAID,
    "Spell lantern.": "l-a-n-t-e-r-n.",
    "Reverse the word stone.": "s-t-o-n-e becomes enots.",
    "Count from 5 to 9.": "5, 6, 7, 8, 9.",
    "Is fox in this list: owl, fox, bee?": "owl, fox: yes, fox is in the list.",
    "Name the months from March to June.": "March, April, May, June.",
}
MOST_STEPS = 3_000  # an engine that has not finished by then never will


# --- comparing ----------------------------------------------------------------------------------


def assert_close(found: mx.array, wanted: mx.array, what: str, tolerance: float = 1e-4) -> None:
    """Assert that the numbers are the same up to rounding, or say where they begin to differ."""
    __tracebackhide__ = True
    assert isinstance(found, mx.array), f"{what}: {found!r} came out, expected an mx.array"
    assert found.shape == wanted.shape, (
        f"{what}: the shape is {found.shape}, expected {wanted.shape}"
    )
    found = found.astype(mx.float32)
    wanted = wanted.astype(mx.float32)
    size = mx.where(mx.isfinite(wanted), mx.abs(wanted), 0).max().item()
    is_close = mx.abs(found - wanted) <= tolerance * max(1.0, size)
    is_close = is_close | (found == wanted)  # infinities are close, too
    if mx.all(is_close).item():
        return
    first = mx.argmin(is_close).item()
    came = found.flatten()[first].item()
    right = wanted.flatten()[first].item()
    place = []
    for axis in reversed(found.shape):
        first, at = divmod(first, axis)
        place.insert(0, at)
    raise AssertionError(f"{what}: {came:.6g} at {place}, expected {right:.6g}")


def drawn(shape: Sequence[int], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed + crc32(SEED.encode())))


def numbered(count: int) -> mx.array:  # (count, 2, 4)
    """Return keys of two heads: token i has the number i in head 0, and i + 10 in head 1."""
    k = mx.arange(1, count + 1)[:, None, None] + 10 * mx.arange(2)[None, :, None]
    return mx.broadcast_to(k, (count, 2, 4)).astype(mx.float32)


def row_pictures(arrays: Sequence[mx.array], place: str, most: int = 16) -> list[str]:
    """Draw a line for each head of a slot or page that holds anything.

    All numbers of a row must be equal.
    """
    lines = []
    for layer, array in enumerate(arrays):
        heads = array.shape[1] // 2
        assert mx.all(array == array[..., :1]).item(), "a row has numbers of several tokens"
        for part, letter in enumerate("kv"):
            for at, head in product(range(len(array)), range(heads)):
                numbers = array[at, part * heads + head, :, 0].tolist()
                if any(numbers):
                    cells = [f"{each:2.0f}" if each else " ." for each in numbers[:most]]
                    where = f"layer {layer}, {letter}, {place} {at}, head {head}"
                    lines.append(f"{where} {' '.join(cells)}")
    return lines


# --- the demo model -----------------------------------------------------------------------------


@cache
def demo() -> tuple:
    return read_model(DEMO, kv="float32", attention="plain"), Tokenizer(DEMO, 1536)


def ids_of(prompt: str = SUM) -> tuple[int, ...]:
    return tuple(demo()[1].ask(prompt))


def text_of(ids: Sequence[int]) -> str:
    return demo()[1].tokenizer.decode(list(ids))


def new_slab(slots: int = 1, length: int = 128) -> kv.Slab:
    model, _ = demo()
    return kv.Slab(*slab_shape(model.config, slots, length, 32), model.dtype)


def logits(
    ids: Sequence[int],
    slab: kv.Slab | None = None,
    start: int = 0,
    logits_at: Sequence[int] | None = None,
) -> mx.array:  # (n, V)
    """Return the logits of tokens that go into slot 0, from row `start` on."""
    model, _ = demo()
    window = kv.Window(slab or new_slab(), [0], [start], len(ids))
    logits_at = range(len(ids)) if logits_at is None else logits_at
    return model.head(llama.forward(model, mx.array(list(ids)), [window], logits_at))


def our_logits(ids: Sequence[int]) -> mx.array:  # (N, V)
    """Compute logits by code that shares nothing with the chapters. A handout has it, too."""
    return small_llama.forward(ids, [small_llama.Rows().at(0, len(ids))])


# --- engines ------------------------------------------------------------------------------------


@contextmanager
def new_engine(slots: int, policy: str = "continuous", **options) -> Iterator[Engine]:
    options = {"max_len": 128, "chunk": 32, "prefix_cache": False, "speculate": 0} | options
    with Engine(*demo(), slots=slots, policy=policy, **options) as engine:
        yield engine


def run_all(engine: Engine) -> None:
    """Step until nothing is left to do. An exception in a step is raised here."""

    def fail(error: BaseException) -> None:
        raise error

    engine._fail = fail
    for _ in range(MOST_STEPS):
        worked = engine.step()
        check(engine)
        if not worked:
            return
    raise AssertionError(f"after {MOST_STEPS} steps, requests still run or wait")


def ask(engine: Engine, prompt: str = SUM, **settings) -> Handle:
    return engine.submit(ids_of(prompt), SamplingParams(**{"max_tokens": 40} | settings))


def steps_for(engine: Engine, prompts: Iterable[str]) -> int:
    """Answer all prompts at once, and check the answers. Return the number of steps."""
    handles = {prompt: ask(engine, prompt) for prompt in prompts}
    run_all(engine)
    for prompt, handle in handles.items():
        assert handle.result().text == ANSWERS[prompt]
    return engine.registry.steps.count


# --- a scheduler without a model ----------------------------------------------------------------


LEGEND = "timeline (p: a prompt's last chunk, P: any other, d: decode):"


class Tale(Story):
    """A story in which requests share no rows."""

    def submit(self, *rest, **options) -> Request:
        return super().submit(*rest, prefix_cache=False, **options)

    def should_be(self, drawing: str) -> None:
        __tracebackhide__ = True
        assert self.drawn() == timeline(drawing), LEGEND
