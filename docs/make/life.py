"""List our functions that one request enters until its first token, in order and with their files.

    python docs/make/life.py

There is one slot and one request, from `submit` to the step that delivers its first token. The list ends
with two figures: the number of functions entered, and the number of changes to another file. To see whether
a change makes the path longer, compare with the output in another checkout.

The list omits all layers but the first, the functions of `ops.py`, `rope.py` and `layers.py` in `models` and
of `device.py` and `row_ops.py` in `kernels`, and the slab's windows. Comprehensions, generator expressions
and lambdas count as part of their function. Consecutive calls of the same function share a line.
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
            generators.add(frame)  # because each resume is reported as a call, too
        stack = [frame]
        while stack[-1].f_back:
            stack.append(stack[-1].f_back)
        names = [caller.f_code.co_name for caller in stack]
        # Calls in later layers come from the same call sites as in the first layer
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
        trace(engine, "What is 17 + 6?")  # warm up what is created on first use
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
