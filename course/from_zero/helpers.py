"""What the stages' tests share: the demo model, engines, stories of a scheduler, and comparisons."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from story import Story, timeline

import kv
import llama
from course.overlay import our_file
from nanobatch import Engine, Handle, Sampling
from parts.api.faults import LOG
from parts.device.mlx import mx
from parts.model.find import DEMO
from parts.model.fit import slab_shape
from parts.model.load import read_model
from parts.text.tokens import Text
from sched import Request

SUM = "What is 17 + 6?"
ANSWERS = {
    SUM: "7 + 6 = 13, so 17 + 6 = 23.",
    "Spell lantern.": "l-a-n-t-e-r-n.",
    "Reverse the word stone.": "s-t-o-n-e becomes enots.",
    "Count from 5 to 9.": "5, 6, 7, 8, 9.",
    "Is fox in this list: owl, fox, bee?": "owl, fox: yes, fox is in the list.",
    "Name the months from March to June.": "March, April, May, June.",
}
MOST_STEPS = 3_000  # an engine that has not ended by then will not end


# --- comparing ----------------------------------------------------------------------------------


def assert_close(found: mx.array, wanted: mx.array, what: str, tolerance: float = 1e-4) -> None:
    """Are these numbers the same, but for rounding? Else say where they begin to differ."""
    __tracebackhide__ = True
    assert isinstance(found, mx.array), f"{what}: {found!r} came out, and should be an mx.array"
    assert found.shape == wanted.shape, (
        f"{what}: the shape is {found.shape}, and should be {wanted.shape}"
    )
    found = found.astype(mx.float32)
    wanted = wanted.astype(mx.float32)
    size = mx.where(mx.isfinite(wanted), mx.abs(wanted), 0).max().item()
    is_close = mx.abs(found - wanted) <= tolerance * max(1.0, size)
    is_close = is_close | (found == wanted)  # infinities, too
    if mx.all(is_close).item():
        return
    first = mx.argmin(is_close).item()
    came = found.flatten()[first].item()
    right = wanted.flatten()[first].item()
    place = []
    for axis in reversed(found.shape):
        first, at = divmod(first, axis)
        place.insert(0, at)
    raise AssertionError(f"{what}: {came:.6g} came out at {place}, and should be {right:.6g}")


def drawn(shape: Sequence[int], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@cache
def ours(module: str) -> ModuleType:
    """A chapter of ours, next to the reader's."""
    name = f"our_{module}"
    spec = spec_from_file_location(name, our_file(module))
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# --- the demo model -----------------------------------------------------------------------------


@cache
def demo() -> tuple:
    return read_model(DEMO), Text(DEMO, 1536)


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
    asked: Sequence[int] | None = None,
    kv: ModuleType = kv,
    llama: ModuleType = llama,
) -> mx.array:  # (n, V)
    """These tokens go into slot 0, from row `start` on."""
    model, _ = demo()
    window = kv.Window(slab or new_slab(), [0], [start], len(ids))
    asked = range(len(ids)) if asked is None else asked
    return model.head(llama.forward(model, mx.array(list(ids)), [window], asked))


def our_logits(ids: Sequence[int]) -> mx.array:  # (N, V)
    return logits(ids, kv=ours("kv"), llama=ours("llama"))


def answer(prompt: str, keeps: bool) -> tuple[str, int]:
    """An answer, token by token, and how many tokens were computed for it. `keeps`: keys and values
    of a step stay in the slab; else each step begins at the first token."""
    _, text = demo()
    ids = list(ids_of(prompt))
    length = len(ids)
    slab = new_slab()
    start = 0
    computed = 0
    while ids[-1] not in text.end_tokens and len(ids) < 120:
        new = ids[start:]
        found = logits(new, slab, start, asked=[len(new) - 1])
        computed += len(new)
        start = len(ids) if keeps else 0
        ids.append(mx.argmax(found).item())
    return text_of(ids[length:]), computed


# --- engines ------------------------------------------------------------------------------------


@contextmanager
def new_engine(slots: int, policy: str = "continuous", **options) -> Iterator[Engine]:
    options = {"max_len": 128, "chunk": 32, "reuse": False, "guesses": 0} | options
    with Engine(*demo(), slots=slots, policy=policy, **options) as engine:
        yield engine


class Faults(logging.Handler):
    """What fails in a step. The engine tells its logger, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple] = []

    def emit(self, record: logging.LogRecord) -> None:
        _, error, trace = record.exc_info
        self.found.append((error, trace))  # the engine takes the trace from the error

    def __enter__(self) -> "Faults":
        LOG.addHandler(self)
        return self

    def __exit__(self, *_) -> None:
        LOG.removeHandler(self)


def run_all(engine: Engine) -> None:
    """Step until nothing is left. What fails in a step fails here."""
    for _ in range(MOST_STEPS):
        with Faults() as faults:
            worked = engine.step()
        for error, trace in faults.found:
            raise error.with_traceback(trace)
        engine.check()
        if not worked:
            return
    raise AssertionError(f"after {MOST_STEPS} steps, requests still run or wait")


def ask(engine: Engine, prompt: str = SUM, **settings) -> Handle:
    return engine.submit(ids_of(prompt), Sampling(**{"max_tokens": 40} | settings))


def steps_for(engine: Engine, prompts: Iterable[str]) -> int:
    """Answer all of them at once, rightly. How many steps does it take?"""
    handles = {prompt: ask(engine, prompt) for prompt in prompts}
    run_all(engine)
    said = {prompt: handle.result().text for prompt, handle in handles.items()}
    assert said == {prompt: ANSWERS[prompt] for prompt in said}
    return engine.steps


# --- a scheduler without a model ----------------------------------------------------------------


LEGEND = "timeline (p: a prompt's last chunk, P: any other, d: decode):"


class Tale(Story):
    """A story in which requests share no rows."""

    def submit(self, *rest, **options) -> Request:
        return super().submit(*rest, reuse=False, **options)

    def should_be(self, drawing: str) -> None:
        __tracebackhide__ = True
        assert self.drawn() == timeline(drawing), LEGEND
