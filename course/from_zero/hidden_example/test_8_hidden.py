"""An example of hidden checks for stage 8."""

from course.from_zero.shared_by_tests import ANSWERS, SUM, ask, new_engine, run_all


def test_planted_neighbours():
    """An answer stays the same next to its own prompt with other settings, and next to requests
    that end or are cancelled."""
    with new_engine(slots=4, budget=40) as engine:
        warm = [ask(engine, temperature=1.5, seed=seed, max_tokens=seed) for seed in range(1, 6)]
        mine = ask(engine)
        others = [ask(engine, prompt, max_tokens=2) for prompt in ANSWERS]
        for _ in range(6):
            engine.step()
        others[-1].cancel()
        run_all(engine)
    assert mine.result().text == ANSWERS[SUM]
    assert [len(handle.tokens) for handle in warm] == [1, 2, 3, 4, 5]


def test_cancel_in_flight():
    """A request cancelled while a step is in flight gets no token from it, but the slot's next
    owner gets its tokens."""
    with new_engine(slots=1) as engine:
        engine.eager_first_token = False
        first = ask(engine)
        second = ask(engine)
        engine.step()
        first.cancel()
        run_all(engine)
    assert first.finish_reason == "cancelled" and not first.tokens
    assert second.result().text == ANSWERS[SUM]
