"""Stage 7: chunks under a budget. You write `_cut` and `_allot` in sched.py.

In the drawings, A[0:4] means rows 0 to 3 of A's prompt, and d a decode.
"""

import pytest
from scheduler_story import name, timeline

from course.from_zero.shared_by_tests import ANSWERS, SUM, Tale, ask, new_engine, run_all


def cuts(tale: Tale) -> list[str]:
    """Run to the end. Return a line for each step."""
    tale.drawn()
    lines = []
    for plan in tale.plans:
        cells = [f"{name(c.request)}[{c.start}:{c.stop}]" for c in plan.chunks]
        cells += [f"{name(d.request)}:d" for d in plan.decodes]
        lines.append(f"{plan.step:>2} | {' '.join(cells)}")
    return lines


@pytest.mark.about("_cut", "_allot")
def test_chunks():
    """A prompt is cut into chunks, and the others decode next to it."""
    tale = Tale(slots=2, chunk=4, budget=8)
    tale.submit_all((2, 5), (11, 2))
    assert cuts(tale) == timeline("""
         1 | A[0:2] B[0:4]
         2 | B[4:8] A:d
         3 | B[8:11] A:d
         4 | A:d B:d
         5 | A:d
    """)


@pytest.mark.about("_cut", "_allot")
def test_budget():
    """The last chunk is cut where the budget ends."""
    tale = Tale(slots=3, chunk=4, budget=6)
    tale.submit_all((6, 4), (7, 4), (7, 2))
    assert cuts(tale) == timeline("""
         1 | A[0:4] B[0:2]
         2 | A[4:6] B[2:6]
         3 | B[6:7] C[0:4] A:d
         4 | C[4:7] A:d B:d
         5 | A:d B:d C:d
         6 | B:d
    """)
    held = [[name(request) for request in plan.held] for plan in tale.plans]
    assert held == [["C"], ["C"], [], [], [], []]


@pytest.mark.about("_allot")
def test_short_first():
    """A short prompt does not wait for a long one, and leaves half of the budget to the oldest."""
    tale = Tale(slots=2, chunk=8, budget=8)
    tale.submit(24, 1)
    tale.step()
    tale.submit(6, 2)
    assert cuts(tale) == timeline("""
         1 | A[0:8]
         2 | B[0:4] A[8:12]
         3 | B[4:6] A[12:18]
         4 | A[18:24] B:d
    """)
    tale = Tale(slots=3, chunk=8, budget=15)
    tale.submit_all((24, 1), (8, 1), (8, 1))
    assert cuts(tale) == timeline("""
         1 | B[0:7] A[0:8]
         2 | B[7:8] C[0:6] A[8:16]
         3 | C[6:8] A[16:24]
    """)


@pytest.mark.about("_allot")
def test_nothing_is_kept_in_vain():
    """Budget that the oldest prompt cannot use is not reserved for it."""
    tale = Tale(slots=3, chunk=8, budget=8)
    tale.submit_all((10, 1), (12, 1), (9, 1))
    assert cuts(tale) == timeline("""
         1 | C[0:4] A[0:4]
         2 | C[4:8] A[4:8]
         3 | C[8:9] A[8:10] B[0:5]
         4 | B[5:12]
    """)
    tale = Tale(slots=4, chunk=8, budget=32)
    tale.submit_all((16, 1), (8, 1), (8, 1), (8, 1))
    assert cuts(tale) == timeline("""
         1 | B[0:8] C[0:8] D[0:8] A[0:8]
         2 | A[8:16]
    """)


@pytest.mark.about("_cut", "_allot")
def test_a_long_prompt():
    """A long prompt in chunks gets the same answer as a whole."""
    story = "Once there was a fox. The fox was kind, and went to the lake with a lantern. " * 8
    said = []
    for chunk in (32, 128):
        with new_engine(
            slots=2, max_len=384, chunk=chunk, budget=chunk + 8, run_ahead=False
        ) as engine:
            long = ask(engine, story + SUM, max_tokens=12)
            short = ask(engine)
            run_all(engine)
            assert short.result().text == ANSWERS[SUM]
            said.append(long.tokens)
            most = max(
                sum(stop - start for _, _, start, stop in step.prefill) + len(step.decode)
                for step in engine.snapshot().steps
            )
            prompt = len(long.request.prompt)
            print(f"{prompt} tokens in chunks of {chunk}: {most} tokens in a step at most")
    assert said[0] == said[1]
