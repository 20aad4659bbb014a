"""Rung 1: one token at a time.

    python course/ladder/1_one_token.py

A language model is a function. Its input is a list of tokens: numbers, each of which stands for a
few letters. Its output is one score for each token of its vocabulary: how well that token would
come next. To write an answer we take the token with the best score, append it to the others, and
call the function again with the longer list. When the best token is the one that means "end", we
stop.

    What is 17 + 6?                 ->  7
    What is 17 + 6? 7               ->  +
    What is 17 + 6? 7 +             ->  6    and so on

This is called greedy decoding. Everything that a serving engine does is this loop, for many lists
at a time, without doing anything twice.

The function is `forward` in `llama.py`. We use the real one, and read it later. It needs three
things besides the model:

- The tokens' numbers.
- A place in which the model writes down what it has to remember about each token. That place is a
  *slab* (`kv.py`), and a *window* says which part of the slab is meant. This rung makes a new slab
  for each step, and throws it away. The next rung asks what that costs.
- The places of the tokens whose next token is wanted. Here that is the last one.

For each of these tokens it yields a *state*: about two hundred numbers that represent what the
model has understood so far. The model's *head* compares a state with every token of the vocabulary.
That gives the scores.

Putting a list of tokens through the model, all side by side, is called a *prefill*. On this rung
every step is a prefill that computes all tokens of the list: look at the column of tokens computed.
(The time grows with them, as you will see in the longer answer of rung 2.) Below, the program draws
a character for each step: ▒ for a prefill. The digit in ▒1▒▒ is the request's number, written over
its second step.

The demo model is a toy that tells stories, counts, spells and reverses words, and adds up numbers
to 99. It is small, so a step takes milliseconds, and anyone can see whether its answer is right.
"""

import time

from board import Timeline, launch, load, price, show_answers

from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.memory import slab_shape

PROMPT = "What is 17 + 6?"
MODEL, TEXT = load()


def new_slab(length: int) -> Slab:
    """Return a slab with room for this many tokens.

    The length is rounded up to a multiple of 32, because attention reads 32 rows at a time.
    """
    shape = slab_shape(MODEL.config, 1, length, 32)
    return Slab(*shape, MODEL.dtype)


def next_token(ids: list[int]) -> int:
    """Put all tokens in, and return the best next one."""
    slab = new_slab(len(ids))
    # All tokens go into slot 0, from row 0 on. (These are lists, because a window can hold several
    # sequences: rung 3.)
    window = Window(slab, slots=[0], starts=[0], L=len(ids))
    last = len(ids) - 1
    states = forward(MODEL, mx.array(ids), [window], logits_at=[last])  # (1, D)
    scores = MODEL.head(states)  # (1, V)
    best = mx.argmax(scores)
    return best.item()  # MLX is lazy: until `item` asks for the number, nothing has been computed


def main() -> None:
    ids = TEXT.ask(PROMPT)  # the prompt within the model's chat template, as in its training
    length = len(ids)
    total = 0
    timeline = Timeline(slots=1)
    began = time.perf_counter()
    print("step  tokens computed  next token")
    while ids[-1] not in TEXT.end_tokens:
        computed = len(ids)
        token = next_token(ids)
        ids.append(token)
        total += computed
        timeline.step({0: ("prefill", 1)})
        step = len(timeline.steps)
        print(f"{step:>4}  {computed:>15}  {TEXT.after([], [token])[0]!r}")
    seconds = time.perf_counter() - began
    answer = ids[length:]
    print(f" all  {total:>15}  to read {length} tokens and write {len(answer)}")

    show_answers(TEXT, [PROMPT], [answer])
    timeline.show(f"One token a step, without a cache: {price(len(answer), total, seconds)}")
    print(f"""
Question: the last step computed {len(ids) - 1} tokens. The step before had computed all of them but
one. Norms, projections and the MLP treat each token by itself. So for what are the old tokens
needed again?
The real code answers: llama.py, attention.
Next: python course/ladder/2_cache.py""")


if __name__ == "__main__":
    launch(main)
