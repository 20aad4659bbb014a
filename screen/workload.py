"""The prompts of a burst, and the settings that prompts are sent with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.snapshot import RequestView

if TYPE_CHECKING:
    from text.tokenizer import Prompt

# Two prompts of the burst begin with this text. It is longer than a chunk of the demo, so that the
# second prompt finds the first one's rows in the prefix cache.
CHUNK = 64
EVENING = (
    "It is late, and the children are in bed. They have had their supper, they have brushed their teeth, and the lamp "
    "by the window is still on. They want to hear one more story before they go to sleep, and it should be a story "
    "with a good end."
)

# (prompt, max tokens). Short answers alternate with long ones, because policies differ most for
# such a mix.
BURST = (
    ("Tell me a story about a fox and a lantern.", 320),
    ("What is 3 + 4?", 16),
    ("Count from 7 to 19.", 64),
    ("What is a slot?", 48),
    ("Spell the word lantern.", 32),
    (f"{EVENING} Tell me a long story about a fox.", 320),
    ("Is fox in this list: owl, fox, bee?", 24),
    ("Say the alphabet from f.", 64),
    ("Why batch?", 48),
    ("Reverse the word stone.", 32),
    ("Tell me a long story about a girl and a kite.", 320),
    ("Name the days from Tuesday.", 32),
    ("Repeat: the cat sat on the mat.", 24),
    ("What is 12 + 9?", 24),
    (f"{EVENING} Tell me a story about a cat and a drum.", 320),
    ("Count from 30 to 41.", 64),
)
# The schema of "/json"
SCHEMA = """{"type": "object", "additionalProperties": false, "required": ["who", "age", "likes"],
"properties": {"who": {"enum": ["a fox", "an owl", "a cat"]}, "age": {"type": "integer",
"minimum": 1, "maximum": 20}, "likes": {"type": "array", "minItems": 1, "maxItems": 3, "items":
{"type": "string", "pattern": "^[a-z ]{3,16}$"}}}}"""
CANDIDATES = 6  # likeliest tokens in the token inspector


class Ask(NamedTuple):
    """A prompt and its sampling settings."""

    prompt: str
    max_tokens: int
    temperature: float | None  # None: the model's default
    seed: int | None
    schema: str = ""  # JSON schema of the answer
    logprobs: int | None = None  # number of top tokens whose log probabilities are returned
    mute: bool = False  # do not log it: an experiment may submit hundreds
    client: str = ""  # name of the client
    question: int = 0  # number of the question in a conversation; 0: none
    messages: Sequence[dict[str, str]] = ()  # the conversation, ending with the prompt
    speculate: bool = True  # allow draft tokens
    read: Prompt | None = None  # the tokenized prompt


def is_mute(request: RequestView) -> bool:
    return isinstance(request.origin, Ask) and request.origin.mute


class Settings(NamedTuple):
    """The settings of the next prompts, changed by `/set`."""

    temperature: float | None = None  # None: the model's default
    max_tokens: int = 320
    seed: int | None = None
    burst: int = 24
    rate: float = 2.0  # rate of the steady load, in requests per second
    client: str = ""  # used by the policy `fair`, which shares slots among clients
    speculate: bool = True  # False: one token per step, so that steps are predictable

    @property
    def words(self) -> str:
        """The settings in the form that `/set` takes."""
        seed = "none" if self.seed is None else self.seed
        temperature = "default" if self.temperature is None else f"{self.temperature:g}"
        figures = f"temperature={temperature} max={self.max_tokens} seed={seed}"
        client = f" client={self.client}" if self.client else ""
        return f"{figures} burst={self.burst} rate={self.rate:g}{client}"

    def ask(self, prompt: str, most: float = math.inf, number: int = 0) -> Ask:
        """Return a prompt with these settings and at most `most` new tokens.

        `number` is added to the seed.
        """
        seed = None if self.seed is None else self.seed + number
        most = min(most, self.max_tokens)
        rest = {"client": self.client, "speculate": self.speculate}
        return Ask(prompt, most, self.temperature, seed, **rest)
