"""Exercise 6: prompt-lookup speculation.

    python -m pytest -x exercises/test_6_speculation.py

The task. A step reads every weight to bring one token for each sequence. It could check several at
almost the same price, if they were guessed. Often that is easy, because an answer repeats its
prompt, or itself. So look where the last two tokens stood side by side before, and guess that what
followed then follows now:

    owl, cat, fox, bee ...  answer so far: owl, cat,        guess:  fox , bee ,
                                           ^^^^ stood before

The newest token and its guesses go in as one piece, several tokens wide. The model says what it
would have said after each of them. As long as that is the next guess, the guess was right. The
first answer behind the last right guess is right as well, as it always was. So a step yields one
token more than it had right guesses.

The engine can do all of this (`Engine(guesses=...)`), and `parts/guess.py` says what to guess. Try
without looking there: write a search of your own. An engine gets an option `speculate`, the most
tokens to guess in a step; 0, the default, leaves all as it is. And an engine that speculates does
not run ahead: a guess follows the newest token, which Python must know. Answers stay the same,
token for token, whatever is guessed, if one rule is kept: which rows may a guess have?

Read first: `sched.py` as a whole, with `Guess` and `Scheduler.commit`; in `nanobatch.py` `Order.of`,
`alike` and `Runner._choose`; rung 5 of the ladder.

Where: `nanobatch.py`: `Engine`, and a function that the scheduler is handed as its `guess`.

How to know: the command above, and `python -m pytest tests/book/test_engine.py
tests/book/test_sched.py tests/book/test_guesses.py`. They take minutes. The solution in
`exercises/solutions` adds 20 lines.
"""

import inspect

import pytest
from checkpoints import make_checkpoint
from hints import not_done

from nanobatch import Engine, Model, Sampling, Text
from parts.model.load import read_model

ANIMALS = "cat, dog, owl, bee, cow, hen, pig, fox"
WORDY = f"Is fox in this list: {ANIMALS}?"
MIXED = [
    WORDY,
    "What is 17 + 6?",
    "Count from 3 to 20.",
    "Reverse the word stone.",
    f"Is owl in this list: {ANIMALS}?",
]


def check_there_is_an_option() -> None:
    if "speculate" not in inspect.signature(Engine.__init__).parameters:
        not_done("nanobatch.py: Engine has no option speculate")


def serve(engine: Engine, asks: list[tuple]) -> list[tuple[list[int], str]]:
    """Tokens and reasons of all of them at once, with every invariant checked in every step."""
    handles = [engine.submit(*ask) for ask in asks]
    while engine.step():
        engine.check()
    told = sum(step.tokens for step in engine.snapshot().steps)
    assert told == sum(len(handle.tokens) for handle in handles), (
        "the steps' figures do not add up to the tokens"
    )
    return [(handle.tokens, handle.finish_reason) for handle in handles]


def demo(speculate: int, prompts: list[str], **options) -> tuple[list, int]:
    check_there_is_an_option()
    with Engine.load("demo", slots=3, max_len=256, speculate=speculate, **options) as engine:
        answers = serve(
            engine, [(engine.text.ask(prompt), Sampling(max_tokens=60)) for prompt in prompts]
        )
        return answers, engine.steps


def test_speculation_changes_no_token():
    assert demo(4, MIXED)[0] == demo(0, MIXED)[0]


def test_speculation_takes_fewer_steps_where_an_answer_repeats_its_prompt():
    (plain, steps), (quick, fewer) = demo(0, [WORDY]), demo(6, [WORDY])
    assert quick == plain and len(plain[0][0]) > 15
    assert fewer <= 0.7 * steps, f"{fewer} steps, {steps} without guesses"


def test_speculation_stops_where_the_answer_ends():
    """At many lengths, and at every token of the answer: also in the midst of right guesses."""
    ((answer, _),), _ = demo(0, [WORDY])
    wanted = [(answer[:count], "length") for count in range(1, len(answer), 3)]
    asks = [Sampling(max_tokens=count) for count in range(1, len(answer), 3)]
    for token in dict.fromkeys(answer):
        wanted.append((answer[: answer.index(token) + 1], "stop"))
        asks.append(Sampling(max_tokens=60, stop=token))
    with Engine.load("demo", slots=4, max_len=256, speculate=6) as engine:
        assert serve(engine, [(engine.text.ask(WORDY), sampling) for sampling in asks]) == wanted
        assert engine.steps < sum(len(tokens) for tokens, _ in wanted) / 4


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> tuple[Model, Text]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), seed=1)
    return read_model(folder), Text(folder, 272)


def test_speculation_survives_wrong_guesses_up_to_the_end_of_a_slot(random_model):
    """A random model repeats its prompt by chance alone, so nearly all guesses are wrong."""
    check_there_is_an_option()
    # All but one fill a slot
    asks = [([5, 6] * 40, 48), ([7, 8, 9] * 20, 68), ([1, 2] * 10, 30), ([3] * 50, 78)]
    found = []
    for speculate in (0, 5):
        with Engine(*random_model, slots=2, max_len=128, chunk=32, speculate=speculate) as engine:
            found.append(
                serve(
                    engine,
                    [(ids, Sampling(max_tokens=most, ignore_eos=True)) for ids, most in asks],
                )
            )
    assert found[0] == found[1]


def test_speculation_changes_no_token_that_is_drawn(random_model):
    """A token is drawn by a hash of seed and place, so there is a right guess for it, too."""
    check_there_is_an_option()
    asks = [([1, 2, 3] * 9, Sampling(max_tokens=40, ignore_eos=True))]
    asks.append(([1, 2, 3] * 9, Sampling(max_tokens=40, ignore_eos=True, temperature=0.7, seed=3)))
    found = []
    for speculate in (0, 4):
        with Engine(*random_model, slots=2, max_len=128, chunk=32, speculate=speculate) as engine:
            found.append(serve(engine, asks))
    assert found[0] == found[1]
