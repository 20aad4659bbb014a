"""Stage 10: speculative decoding, by prompt lookup.

The problem. A step reads every weight of the model, and adds one token to the answer. The same read
could verify several tokens, if somebody guessed them.

The solution. Much of an answer repeats earlier text. If the two newest tokens have occurred before,
the tokens that followed them become the *draft*. It goes in after the newest token, and the model
predicts the next token after each of these. As long as the model samples the drafted tokens, the
draft is right:

    text so far      owl , fox , bee . owl ,
    draft                    fox , bee               the newest token is the second "owl ,"
    goes in          ,       fox ,   bee             four rows
    comes out        fox     ,   cat ...             accepted: fox and ",". Then cat: bee was wrong

The invariant: the answer is the greedy one, token by token, however good the draft is. Every
accepted token was sampled by the model, after tokens that are all right.

The price: a row for each draft token, even if it is wrong. The keys and values of wrong tokens
remain after the end of the sequence until the next tokens overwrite them. Also, a step must be read
before the next one can be drafted, so there is no run-ahead.

Where it loses: if a text does not repeat itself, because few drafts are accepted. It also loses in
a full batch: once computing takes as long as reading the weights, each wasted row makes all others
wait.

Where next: prompt_lookup.py, which drafts only as long as it pays, and
`vllm/v1/spec_decode/ngram_proposer.py`.
"""

from collections.abc import Callable, Collection, Sequence

Step = Callable[[list[int], int], list[int]]


def draft(text: Sequence[int], most: int) -> list[int]:
    """Return up to `most` tokens that followed the newest two when these last occurred.

    If they have not occurred before, return an empty list.
    """
    for at in range(len(text) - 3, -1, -1):
        if text[at : at + 2] == text[-2:]:
            return list(text[at + 2 : at + 2 + most])
    return []


def accept(drafted: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens to append to the answer.

    `sampled` has the model's tokens after the newest token and after each drafted one: one more
    than `drafted`.
    """
    right = 0
    while right < len(drafted) and drafted[right] == sampled[right]:
        right += 1
    return list(sampled[: right + 1])


def answer(
    step: Step, prompt: list[int], most: int, max_tokens: int, ends: Collection[int]
) -> list[int]:
    """Return the greedy answer, with drafts of up to `most` tokens.

    It ends with a token of `ends`, or after `max_tokens`. `step(ids, start)` puts ids into the rows
    from `start` on, and returns the next token after each of them.
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
