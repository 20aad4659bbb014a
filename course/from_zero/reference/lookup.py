"""Stage 10: speculative decoding, by prompt lookup.

The problem. A step reads every weight of the model, and adds one token to the answer. It could
verify several with the same reading, if somebody guessed them.

The solution. Much of an answer repeats earlier text. Where the two newest tokens occurred before,
what came after them then is the *draft* now. It goes in after the newest token, and the model says
what comes after each of them. As long as it samples what was drafted, the draft is right:

    text so far      owl , fox , bee . owl ,
    draft                    fox , bee               the newest token is the second "owl ,"
    goes in          ,       fox ,   bee             four rows
    comes out        fox     ,   cat ...             accepted: fox and ",". Then cat: bee was wrong

The invariant: the answer is the greedy one, token by token, with a draft of any quality. For what
is taken was always sampled by the model, after tokens that are all right.

The price: a row for each draft token, also for those that are wrong. Their keys and values remain
after the sequence until the next tokens are written over them. And a step must be read before the
next one can be drafted, so there is no run-ahead.

Where it loses: where a text does not repeat itself, because few drafts are accepted. And in a full
batch: once a step computes as long as it reads weights, each row in vain makes all others wait.

Where next: prompt_lookup.py, which drafts as far as it pays, and `vllm/v1/spec_decode/ngram_proposer.py`.
"""

from collections.abc import Callable, Collection, Sequence

Step = Callable[[list[int], int], list[int]]


def draft(text: Sequence[int], most: int) -> list[int]:
    """Up to `most` tokens: those that came after the newest two when these occurred before, the
    last time. None if they did not."""
    for at in range(len(text) - 3, -1, -1):
        if text[at : at + 2] == text[-2:]:
            return list(text[at + 2 : at + 2 + most])
    return []


def accept(drafted: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that the answer gets. `sampled` are the model's, after the newest token and after
    each that was drafted: one more than these."""
    right = 0
    while right < len(drafted) and drafted[right] == sampled[right]:
        right += 1
    return list(sampled[: right + 1])


def answer(
    step: Step, prompt: list[int], most: int, max_tokens: int, ends: Collection[int]
) -> list[int]:
    """The greedy answer, with drafts of up to `most` tokens. It ends with a token of `ends`, or has
    `max_tokens`.

    `step(ids, start)` puts ids into the rows from `start` on, and returns for each of them the token
    that comes next.
    """
    said = step(prompt, 0)[-1:]
    while len(said) < max_tokens and said[-1] not in ends:
        drafted = draft(prompt + said, min(most, max_tokens - len(said) - 1))
        sampled = step([said[-1], *drafted], len(prompt) + len(said) - 1)
        for token in accept(drafted, sampled):
            said.append(token)
            if token in ends:
                break
    return said
