"""Rung 4 and a half: chunks, by hand.

    python course/ladder/4b_chunks.py

On rung 4, a prompt goes in as a whole, in one step. A prompt of 600 tokens makes a step that takes
as long as forty others, and all requests that decode next to it wait: no reader gets a token until
that step is over. The step is long because of one prompt. So we cut the prompt into *chunks*, and
put in one chunk per step.

What has to change? Less than one would think. A window says at which row it begins to write, so a
part of a prompt can be written like a whole one: rows 0 to 63 in this step, rows 64 to 127 in the
next. The earlier tokens that a chunk looks back on are in the slab already. A chunk that does not
end its prompt yields nothing: only the prompt's last token predicts the next one. With a prompt of
203 tokens:

    step    slot 0              slot 1                 in slot 0
       1    decode              prompt[0:64]
       2    decode              prompt[64:128]         a token in each step,
       3    decode              prompt[128:192]        whatever slot 1 is doing
       4    decode              prompt[192:203]  -> the first token of its answer

Compared with rung 4, a sequence knows how many tokens of its prompt are in the slab (`done`), and
`chunk_of` cuts the next piece: these are the 15 lines. `plan` and `commit` are as before. A step
now has an upper limit: one chunk, and one token for each neighbour. That is the *budget* of a step,
which the next rung's scheduler turns into a setting.

The program serves three short prompts, and in step 6 a long one arrives: first with chunks as long
as the longest prompt, so that nothing is cut, then with chunks of 64 tokens. Look at the longest
step.
"""

import time
from dataclasses import dataclass, field

from board import Timeline, launch, load, rate, show_answers

from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.memory import slab_shape

SENTENCE = "The fox was kind, and every day it went to the lake with a small lantern. "
STORY = ("Once there was a fox. " + SENTENCE) * 24
TALK = [{"role": "user", "content": STORY}, {"role": "assistant", "content": "I see."}]
PROMPTS = [
    "Count from 3 to 20.",
    "What is a slot?",
    "Is fox in this list: owl, fox, bee?",
    "What is 17 + 6?",  # this one arrives later, at the end of a long conversation
]
SLOTS = 4
LONGEST = 1024
MODEL, TEXT = load()


@dataclass
class Sequence:
    number: int  # the request's number
    prompt: list[int]
    done: int = 0  # tokens of the prompt that are in the slab
    answer: list[int] = field(default_factory=list)  # tokens so far


@dataclass(frozen=True)
class Chunk:
    sequence: Sequence
    start: int  # the row of its first token
    ids: list[int]
    ends: bool  # its last token ends the prompt, and predicts the next one


def chunk_of(sequence: Sequence, most: int) -> Chunk:
    """Cut the next piece of a prompt, at most `most` tokens."""
    start = sequence.done
    ids = sequence.prompt[start : start + most]
    sequence.done += len(ids)
    ends = sequence.done == len(sequence.prompt)
    return Chunk(sequence, start, ids, ends)


def run(slab: Slab, chunks: dict[int, Chunk], decodes: dict[int, Sequence]) -> dict[int, int]:
    """Run one forward pass for all of them. Return slot -> next token, where one is sampled."""
    ids = []
    windows = []
    logits_at = {}  # slot -> index into `ids`
    for slot, chunk in chunks.items():
        ids += chunk.ids
        windows.append(Window(slab, slots=[slot], starts=[chunk.start], L=len(chunk.ids)))
        if chunk.ends:
            logits_at[slot] = len(ids) - 1
    rows = []
    for slot, sequence in decodes.items():
        ids.append(sequence.answer[-1])
        rows.append(len(sequence.prompt) + len(sequence.answer) - 1)
        logits_at[slot] = len(ids) - 1
    if decodes:
        windows.append(Window(slab, slots=list(decodes), starts=rows, L=1))
    states = forward(MODEL, mx.array(ids), windows, list(logits_at.values()))  # (n, D)
    scores = MODEL.head(states)  # (n, V)
    mx.eval(scores, slab.arrays)  # rows must be written even if no token is sampled
    if not logits_at:
        return {}
    tokens = mx.argmax(scores, axis=-1).tolist()
    return dict(zip(logits_at, tokens, strict=True))


def serve(most: int) -> list[Sequence]:
    """Serve all prompts: a step runs one chunk of each unfinished prompt, and the decodes."""
    talk = TEXT.encode_chat([*TALK, {"role": "user", "content": PROMPTS[-1]}])
    prompts = [*(TEXT.ask(prompt) for prompt in PROMPTS[:-1]), talk]
    sequences = [Sequence(number, list(ids)) for number, ids in enumerate(prompts, 1)]
    running = dict(enumerate(sequences[:-1]))  # slot -> sequence
    slab = Slab(*slab_shape(MODEL.config, SLOTS, LONGEST, 32), MODEL.dtype)
    timeline = Timeline(SLOTS)
    longest = 0  # the largest number of tokens in a step
    began = time.perf_counter()
    while running:
        reading = {slot: s for slot, s in running.items() if s.done < len(s.prompt)}
        decodes = {slot: s for slot, s in running.items() if slot not in reading}
        chunks = {slot: chunk_of(sequence, most) for slot, sequence in reading.items()}
        longest = max(longest, len(decodes) + sum(len(chunk.ids) for chunk in chunks.values()))
        kinds = {slot: "prefill" if slot in reading else "decode" for slot in running}
        timeline.step({slot: (kinds[slot], s.number) for slot, s in running.items()})
        for slot, token in run(slab, chunks, decodes).items():
            running[slot].answer.append(token)
            if token in TEXT.end_tokens:
                del running[slot]
        if len(timeline.steps) == 6:  # now the long one arrives
            running[SLOTS - 1] = sequences[-1]
    seconds = time.perf_counter() - began
    written = sum(len(sequence.answer) for sequence in sequences)
    took = rate(written, len(timeline.steps), seconds)
    timeline.show(f"chunks of {most}: {took}; the longest step computes {longest} tokens")
    return sequences


def main() -> None:
    serve(most=LONGEST)
    sequences = serve(most=64)
    length = len(sequences[-1].prompt)
    print(f"\nRequest 4, a talk of {length} tokens, came after step 6. Below is its last message.")
    show_answers(TEXT, PROMPTS, [sequence.answer for sequence in sequences])
    print("""
Question: here every prompt gets a chunk in each step. If ten long prompts come at once, how many
tokens does a step compute? Who has to wait then, so that those who decode need not?
The real code answers: sched.py, Scheduler._chunks.
Next: python course/ladder/5_run_ahead.py""")


if __name__ == "__main__":
    launch(main)
