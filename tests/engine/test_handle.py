"""The percentiles in a handle's metrics, and why an answer ended."""

from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models

from engine.handle import Handle
from engine.snapshot import percentile
from request import Request
from sampling_params import SamplingParams
from step_output import StepOutput
from text.detokenizer import StreamingDetokenizer


def test_percentile_is_nearest_rank():
    """Regression: `/metrics` was off by one: it reported the longer of two steps as the median."""
    values = [3.0, 1.0, 2.0, *map(float, range(4, 101))]
    assert [percentile(values, part) for part in (0, 0.5, 0.95, 1)] == [1, 50, 95, 100]
    assert percentile([2.0, 1.0], 0.5) == 1
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None


def test_stop_string_in_the_last_token_is_the_reason():
    """A line break can be a byte token, whose text waits for the next token. Regression: if it was the last that
    `max_tokens` allowed, the answer ended with "length"."""
    bytes_and_a = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    tokenizer = Tokenizer(models.BPE(bytes_and_a, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def stream(stops):
        return StreamingDetokenizer(tokenizer, stops, frozenset())

    engine = SimpleNamespace(text=SimpleNamespace(end_tokens=frozenset(), stream=stream))
    request = Request(1, (256,), 2, 0.0)
    handle = Handle(engine, request, SamplingParams(max_tokens=2, stop="\n"), "")
    reasons = []
    for token in (256, 10):
        request.append_token(token)
        reasons.append(handle.append_token(StepOutput(token), 0.0))
    assert (reasons, handle.text, handle.stop) == ([None, "stop"], "a", "\n")
