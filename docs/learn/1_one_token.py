"""Chapter 1: one token at a time.

    python docs/learn/1_one_token.py

A language model is a function. Its input is a list of tokens: numbers, each of which stands for a few letters. Its
output is one score for each token that it knows: how well that token would come next. To write an answer we take the
token with the best score, put it behind the others, and call the function again with the longer list. When the best
token is the one that means "end", we stop.

    What is 17 + 6?                 ->  7
    What is 17 + 6? 7               ->  +
    What is 17 + 6? 7 +             ->  6    and so on

This is called greedy decoding. Everything that a serving engine does is this loop, for many lists at a time, without
doing anything twice.

The function is `forward` in `llama.py`. We use the real one, and read it later. It wants three things:

- The tokens' numbers.
- A place where it may write down what it has to remember about each token. That place is a *slab* (`kv.py`), and a
  *window* says which part of it is meant. This chapter makes a new slab for each step, and throws it away. The next
  chapter asks what that costs.
- Which tokens are asked what comes next. Here it is the last one.

To put a list of tokens through the model, all side by side, is a *prefill*. In this chapter every step is one, and it
computes all tokens that there are: look at the column that says how many. (The time follows it. That shows in a longer
answer, such as chapter 2 has.) Below, the program draws a character for each step: ▒ for a prefill. The digit in ▒1▒▒
is the request's number, written over its second step.

The demo model is a toy that tells stories, counts, spells and reverses words, and adds up numbers to 99. It is small,
so a step takes milliseconds, and anyone can see whether its answer is right.
"""

import time

from board import Timeline, launch, load, rate, show_answers

from kv import Slab, Window
from llama import forward
from parts.device.mlx import mx
from parts.model.fit import slab_shape

PROMPT = "What is 17 + 6?"
MODEL, TEXT = load()


def new_slab(length: int) -> Slab:
    """A place for so many tokens. (Rounded up to a multiple of 32, because attention reads so many at a time.)"""
    return Slab(*slab_shape(MODEL.config, 1, length, 32), MODEL.dtype)


def next_token(ids: list[int]) -> int:
    """All tokens go in, and the best next one comes out."""
    # Slot 0, from row 0 on, all tokens. (These are lists, because a window can hold several sequences: chapter 3.)
    window = Window(new_slab(len(ids)), slots=[0], starts=[0], L=len(ids))
    scores = forward(MODEL, mx.array(ids), [window], asked=[len(ids) - 1])  # (1, V): what comes after the last token
    return mx.argmax(scores).item()  # MLX is lazy: until `item` asks for the number, nothing has been computed


def main() -> None:
    ids = TEXT.ask(PROMPT)  # the model's chat template stands around the prompt, as it did in the training
    length, computed, timeline, began = len(ids), 0, Timeline(slots=1), time.perf_counter()
    print("step  tokens computed  next token")
    while ids[-1] not in TEXT.end_tokens:
        read = len(ids)
        ids.append(next_token(ids))
        computed += read
        timeline.step({0: ("prefill", 1)})
        print(f"{read - length + 1:>4}  {read:>15}  {TEXT.after([], ids[-1])!r}")
    seconds, answer = time.perf_counter() - began, ids[length:]
    print(f" all  {computed:>15}  to read {length} tokens and write {len(answer)}")

    show_answers(TEXT, [PROMPT], [answer])
    timeline.show(f"One token a step, without a cache: {rate(len(answer), seconds)}")
    print(f"""
Question: the last step computed {len(ids) - 1} tokens. The step before had computed all of them but one. Norms,
projections and the MLP treat each token by itself. So for what are the old tokens needed again?
The real code answers: llama.py, attention.
Next: python docs/learn/2_cache.py""")


if __name__ == "__main__":
    launch(main)
