"""The demo model, its training text and its exam."""

import itertools
import json
import random
import re
import time
from collections import Counter
from contextlib import closing

import mlx_lm.utils
import pytest
from planted_bugs import plant
from transformers import AutoTokenizer

import corpus
import eval as exam
import kv
import stories
import tui
from kernels.device import mx
from models.model_finder import DEMO
from nanobatch import Engine, SamplingParams
from screen.workload import BURST, EVENING

TASKS = [skill for skill in corpus.SKILLS if skill not in ("story", "facts", "elsewhere")]


# --- the text -----------------------------------------------------------------------------------


def test_exam_is_not_in_the_training_text():
    examined = {task.prompt for skill in corpus.SKILLS for task in exam.questions(skill, 60)}
    talks = itertools.islice(corpus.conversations("any"), 2000)
    said = [message for talk in talks for message in talk.messages]
    learnt = {message["content"] for message in said if message["role"] == "user"}
    assert len(examined) > 500 and len(learnt) > 2000
    assert not examined & learnt


def tasks(skill: str, count: int = 100) -> list[corpus.Task]:
    rng = random.Random(skill)
    return [corpus.ask(rng, skill) for _ in range(count)]


def added(equation: str) -> bool:
    a, b, total = map(int, re.findall(r"\d+", equation))
    return a + b == total


def test_the_answers_are_right():
    """Check the answers against their prompts, with code that is independent of the generator."""
    for task in tasks("counting"):
        first, last = map(int, re.findall(r"\d+", task.prompt))
        step = 1 if first < last else -1
        assert task.answer == ", ".join(str(n) for n in range(first, last + step, step)) + "."
    for task in tasks("adding"):
        a, b = map(int, re.findall(r"\d+", task.prompt))
        assert task.answer.endswith(f"{a} + {b} = {a + b}.")
        assert all(added(part) for part in task.answer.rstrip(".").split(", so "))
    for task in tasks("alphabet"):
        first, *_, last = task.answer.rstrip(".").split(", ")
        assert (
            task.answer
            == ", ".join("abcdefghijklmnopqrstuvwxyz"[ord(first) - 97 : ord(last) - 96]) + "."
        )
        asked = re.findall(
            r"\b([a-z])\b",
            task.prompt.replace("a part", "").split("alphabet")[-1].split("letters")[-1],
        )
        assert asked in ([first, last], [first], []), task.prompt
    for task in tasks("spelling"):
        assert task.answer.rstrip(".").replace("-", "") in task.prompt
    for task in tasks("reversing"):
        word, turned = task.answer.replace(corpus.CUT, "").rstrip(".").split(" becomes ")
        assert turned == word.replace("-", "")[::-1]
        assert turned[::-1] in task.prompt
    for task in tasks("repeating"):
        assert task.prompt.endswith(f": {task.answer}")
    for task in tasks("membership"):
        wanted = re.search(r"(\S+) is (not )?in the list", task.answer)[1]
        listed = [
            word.rstrip("?.") for word in task.prompt.split(wanted, 1)[1].replace(",", "").split()
        ]
        assert (wanted in listed) == (": yes, " in task.answer), task
        assert task.answer.split(":")[0] in task.prompt


def test_stories_are_consistent():
    """Each story uses one or two names throughout, since a model learns this only from consistent text."""
    rng, first_names = random.Random(3), Counter()
    for n in range(300):
        name = rng.choice(stories.NAMES)[0] if n % 3 == 0 else ""
        text = stories.story(
            rng, "fox", rng.choice(["lantern", "owl", "kite"]), stories.LENGTHS[n % 3], name=name
        )
        names = exam.NAME.findall(text)
        assert 1 <= len(set(names)) <= 2 and (not name or name in names), text
        first_names[names[0]] += not name
    assert 100 < first_names.most_common(1)[0][1] < 190  # out of 200


# --- the checkpoint -----------------------------------------------------------------------------


def test_the_demo_model_is_a_small_llama():
    config = json.loads((DEMO / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (DEMO / "model.safetensors").stat().st_size <= 8 * 2**20
    assert {array.dtype for array in mx.load(str(DEMO / "model.safetensors")).values()} == {
        mx.float16
    }


@pytest.fixture(scope="module")
def demo():
    with Engine.load("demo", slots=8, max_len=640) as engine:
        yield engine


def test_any_text_survives_the_tokenizer(demo):
    rng = random.Random(2)
    texts = [
        "naïve café",
        "日本語のテキスト",
        "🦊🏮 👩‍👩‍👧",
        "\t tabs\n\n and  spaces ",
        "l'été",
        "\x00\x7f\u200b\ufeff",
    ]
    for _ in range(50):
        codes = [
            rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]) for _ in range(20)
        ]
        texts.append("".join(map(chr, codes)))
    for text in texts:
        ids = demo.text.tokenizer.encode(text, add_special_tokens=False).ids
        assert demo.text.tokenizer.decode(ids) == text


def test_transformers_makes_the_same_prompt(demo):
    theirs = AutoTokenizer.from_pretrained(DEMO)
    talk = [
        {"role": "system", "content": "Be kind and brief."},
        {"role": "user", "content": " Count from 3 to 12. "},
        {"role": "assistant", "content": "3, 4."},
        {"role": "user", "content": "Go on, <b>é</b>!"},
    ]
    ids = theirs.apply_chat_template(
        talk, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert list(ids) == demo.text.encode_chat(talk)
    assert demo.text.end_tokens == {theirs.eos_token_id}


def test_mlx_lm_gives_the_same_answers(demo):
    model, _ = mlx_lm.utils.load_model(DEMO)
    model.set_dtype(mx.float32)
    asked = [task.prompt for skill in corpus.SKILLS for task in exam.questions(skill, 2)]
    messages = [[{"role": "user", "content": prompt}] for prompt in asked]
    ours = demo.generate(messages, SamplingParams(max_tokens=40))
    assert len(ours) >= 20 and sum(len(result.tokens) for result in ours) > 200
    for message, result in zip(messages, ours, strict=True):
        prompt = demo.text.encode_chat(message)
        # One forward pass is enough: if each token is the most likely one after its prefix, greedy
        # decoding gives the same answer.
        best = model(mx.array([prompt + result.tokens[:-1]]))[0, len(prompt) - 1 :].argmax(-1)
        assert best.tolist() == result.tokens


# --- the exam -----------------------------------------------------------------------------------


def test_demo_passes_its_exam(demo):
    scores = exam.scores(exam.answer_all(demo, [*TASKS, "story"], 2))
    assert sum(scores.values()) / len(scores) > 0.95, scores


def short_exam(demo: Engine) -> float:
    """Return the score in slots full of random rows, which a correct engine does not read.

    A wrong answer seldom stops by itself, so the token limit is just enough for most correct answers.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(demo.model, demo.text, slots=8, max_len=640) as engine,
    ):
        patch.setattr(exam, "MAX_TOKENS", 60)
        for array in engine.runner.slab.arrays:
            shape = array[:, :, :640].shape
            array[:, :, :640] = mx.random.normal(shape, key=mx.random.key(0)) * 3
        scores = exam.scores(
            exam.answer_all(engine, ["counting", "alphabet", "repeating", "reversing"], 3)
        )
    return sum(scores.values()) / len(scores)


@pytest.fixture(scope="module")
def right_score(demo) -> float:
    return short_exam(demo)


@pytest.mark.parametrize(
    "bug", ["a token too late", "one offset for all rows", "a row lands in its neighbour's slot"]
)
def test_planted_position_bug_lowers_the_score(demo, right_score, monkeypatch, bug):
    """A wrong position or slot lowers the score of the exam."""
    # A decoding token is shifted by one row and leaves a gap
    if bug == "a token too late":
        init = kv.Window.__init__

        def off_by_one(self, slab, slots, starts, L, *rest):
            init(self, slab, slots, [start + (L == 1) for start in starts], L, *rest)

        monkeypatch.setattr(kv.Window, "__init__", off_by_one)
    else:
        plant(monkeypatch, bug)
    assert short_exam(demo) <= 0.5 and right_score > 0.9


def test_burst_prompts_share_a_prefix():
    """Regression: with chunks longer than the shared prefix, the screen never showed that a prompt reuses
    another's rows."""
    engine = tui.load_engine(tui.parse_arguments([]), lambda stage: None, time.perf_counter)
    with closing(engine):
        alike = [prompt for prompt, _ in BURST if EVENING in prompt]
        cached = [
            result.metrics.cached_tokens
            for result in engine.generate(alike, SamplingParams(max_tokens=1))
        ]
    assert cached == [0, 64]
