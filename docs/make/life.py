"""The life of one request to its first token, as text: which of our functions it enters, in which
file and order.

    python docs/make/life.py

One slot, one request, from `submit` to the step that delivers its first token. The list ends with
two figures: the number of functions entered, and how often the reader changes to another file. To see
whether a change makes the way longer, run this file of another checkout, too.

Left out are the layers after the first, what `ops.py`, `rope.py` and `layers.py` in `models` and
`device.py` and `row_ops.py` in `kernels` define, and the slab's windows. A comprehension, a generator
expression or a lambda belongs to its function. A function entered several times in a row takes one
line.
"""

import inspect
import sys
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanobatch import Engine, SamplingParams  # noqa: E402

PACKAGES = ("base", "engine", "models", "kernels", "text", "distributed")
LEFT_OUT = ("models/ops", "models/rope", "models/layers", "kernels/device", "kernels/row_ops")
LEFT_OUT = [ROOT / f"{name}.py" for name in LEFT_OUT]
SAMPLING = SamplingParams(max_tokens=8)


def is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name.startswith("<") or code.co_qualname.startswith("Window."):
        return False
    file = Path(code.co_filename)
    return (file.parent == ROOT or file.parent.name in PACKAGES) and file not in LEFT_OUT


def trace(engine: Engine, prompt: str) -> list[tuple[int, str, str]]:  # depth, file, function
    entered, generators, sites = [], set(), set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not is_ours(frame) or frame in generators:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            generators.add(frame)  # each time that it goes on is a call, too
        stack = [frame]
        while stack[-1].f_back:
            stack.append(stack[-1].f_back)
        names = [caller.f_code.co_name for caller in stack]
        # The second layer's calls come from the same places in the code as the first's
        if "forward" in names[1:]:
            callers = stack[1 : names.index("forward", 1) + 1]
            site = (frame.f_code, *((each.f_code, each.f_lasti) for each in callers))
            if site in sites:
                return
            sites.add(site)
        file = Path(frame.f_code.co_filename).relative_to(ROOT)
        depth = sum(map(is_ours, stack[1:]))
        entered.append((depth, str(file), frame.f_code.co_qualname.replace("<locals>.", "")))

    sys.setprofile(profile)
    handle = engine.submit(prompt, SAMPLING)
    while not handle.tokens:
        engine.step()
    sys.setprofile(None)
    handle.cancel()
    return entered


if __name__ == "__main__":
    with Engine.load("demo", slots=1, max_len=256) as engine:
        trace(engine, "What is 17 + 6?")  # what is made once, when it is first needed, is made now
        life = [
            (line, len(list(same))) for line, same in groupby(trace(engine, "Count from 3 to 12."))
        ]
    for (depth, file, function), count in life:
        print(f"{file:20}{'  ' * depth}{function}{f' x {count}' if count > 1 else ''}")
    different = {(file, function) for (_, file, function), _ in life}
    changes = sum(before[1] != after[1] for (before, _), (after, _) in pairwise(life))
    print(
        f"\n{len(life)} functions are entered, {len(different)} different ones; the file changes {changes} times."
    )
