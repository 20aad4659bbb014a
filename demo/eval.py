"""The demo model's exam: held-out questions, answered by the engine, all in flight at once.

    python demo/eval.py                     # every skill, 120 questions each, 8 slots
    python demo/eval.py --slots 1           # the same answers, one at a time
    python demo/eval.py --skill story --show 5

An answer counts only if every character is right. For a story, only properties that a program can
check count: both nouns occur, characters keep their names (there are at most two names, and the
requested one is there), the length is as requested, the story ends by itself, and no sentence occurs
three times. The rest is for a human reader.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the engine is one folder up

import corpus
from nanobatch import Engine, Result, SamplingParams
from stories import NAMES
from stories import WORDS as WORDS_IN

MAX_TOKENS = 400
# The names in a story, but not the words in "Will it rain?" or "it was June".
NAME = re.compile(rf"(?<!was )\b(?!Will it|Will you)({'|'.join(name for name, _ in NAMES)})\b")


def questions(skill: str, count: int, seed: str = "exam") -> list[corpus.Task]:
    """Return up to `count` different questions of the exam; fewer if the skill has fewer."""
    rng, tasks = random.Random(f"{seed} {skill}"), {}
    for _ in range(20 * count):
        task = corpus.ask(rng, skill, exam=True)
        tasks.setdefault(task.prompt, task)
        if len(tasks) == count:
            break
    return list(tasks.values())


def marks(skill: str, task: corpus.Task, result: Result) -> dict[str, bool]:
    """Grade an answer. Return the name of each mark and whether the answer earns it."""
    ended = result.finish_reason == "stop"
    if skill != "story":
        return {skill: ended and result.text == task.answer.replace(corpus.CUT, "")}
    text = result.text.lower()
    sentences = Counter(part.strip() for part in re.split(r"(?<=[.!?])\s", text))
    low, high = WORDS_IN[length_asked(task.prompt)]
    names, asked_for = set(NAME.findall(result.text)), set(NAME.findall(task.prompt))
    return {
        "story: both nouns": all(re.search(rf"\b{noun}\b", text) for noun in task.item.split()),
        "story: names hold": len(names) <= 2 and asked_for <= names,
        "story: ends": ended,
        "story: no sentence three times": max(sentences.values()) < 3,
        "story: as long as asked": low <= len(text.split()) <= high,
    }


def length_asked(prompt: str) -> str:
    return (
        "short"
        if "short story" in prompt.lower()
        else "long"
        if "long story" in prompt.lower()
        else "medium"
    )


def answer_all(
    engine: Engine, skills: list[str], count: int
) -> dict[str, list[tuple[corpus.Task, Result]]]:
    """Ask all questions of all skills at once, shuffled, so that short and long answers share the
    slots."""
    asked = [(skill, task) for skill in skills for task in questions(skill, count)]
    random.Random(0).shuffle(asked)
    messages = [[{"role": "user", "content": task.prompt}] for _, task in asked]
    results = engine.generate(messages, SamplingParams(max_tokens=MAX_TOKENS))
    answered: dict[str, list[tuple[corpus.Task, Result]]] = {skill: [] for skill in skills}
    for (skill, task), result in zip(asked, results, strict=True):
        answered[skill].append((task, result))
    return answered


def scores(answered: dict[str, list[tuple[corpus.Task, Result]]]) -> dict[str, float]:
    """Return, for each mark, the fraction of answers that earned it."""
    given = [
        mark
        for skill, pairs in answered.items()
        for pair in pairs
        for mark in marks(skill, *pair).items()
    ]
    total, right = Counter(name for name, _ in given), Counter(name for name, good in given if good)
    return {name: right[name] / total[name] for name in total}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Examine the demo model on questions that it was not trained on.",
    )
    add = parser.add_argument
    add("--model", default="demo", help="a model folder (default: demo)")
    add(
        "--skill",
        action="append",
        choices=list(corpus.SKILLS),
        help="only this one; may be repeated",
    )
    add("--prompts", type=int, default=120, help="questions for each skill (default 120)")
    add("--slots", type=int, default=8, help="slots of the engine (default 8)")
    add("--show", type=int, default=0, help="print this many answers of each skill")
    add("--wrong", action="store_true", help="print every answer that lost a mark")
    add("--json", action="store_true", help="print the scores as JSON and nothing else")
    args = parser.parse_args()
    began = time.monotonic()
    with Engine.load(args.model, slots=args.slots) as engine:
        answered = answer_all(engine, args.skill or list(corpus.SKILLS), args.prompts)
    if args.json:
        print(json.dumps({name: round(score, 4) for name, score in scores(answered).items()}))
        return
    for skill, pairs in answered.items():
        for n, (task, result) in enumerate(pairs):
            good = all(marks(skill, task, result).values())
            if n < args.show or (args.wrong and not good):
                print(f"{'ok ' if good else 'NO '} {task.prompt}\n    {result.text}")
    for name, score in scores(answered).items():
        print(f"{score:7.1%}  {name}")
    tokens = sum(len(result.tokens) for pairs in answered.values() for _, result in pairs)
    print(
        f"{args.prompts} prompts a skill, {args.slots} slots, {tokens} tokens, {time.monotonic() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
