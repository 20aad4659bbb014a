"""Random schemas at temperature 1, with models that were not trained on them: every answer that is not
truncated parses, and is valid according to jsonschema.

NANOBATCH_SCHEMAS=1000 runs the long form.
"""

import json
from collections import Counter

import jsonschema
import pytest
from checkpoints import make_checkpoint
from long_forms import number_of
from schemas import random_schema

from nanobatch import Engine, SamplingParams

SCHEMAS = number_of("SCHEMAS", 12)


@pytest.mark.parametrize("model", ["demo", "random"])
def test_finished_json_is_valid(model, tmp_path, capsys):
    """Answers that end with "stop" are valid. Truncated ones ("length") are not checked, and none ends with an
    error."""
    folder = "demo" if model == "demo" else make_checkpoint(tmp_path)
    ends: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong = []
    tokens = 0
    with Engine.load(folder, slots=8, max_len=1024) as engine:
        prompt = engine.text.ask("Count from 3 to 12.")
        for start in range(0, SCHEMAS, 100):
            open_ = []
            for seed in range(start, min(start + 100, SCHEMAS)):
                schema = random_schema(seed)
                jsonschema.Draft202012Validator.check_schema(schema)
                sampling = SamplingParams(
                    max_tokens=500, temperature=1.0, seed=seed, grammar={"json": schema}
                )
                try:
                    open_.append((seed, schema, engine.submit(prompt, sampling)))
                except ValueError as error:
                    refused[str(error)[:70]] += 1
            for seed, schema, handle in open_:
                result = handle.result()
                ends[result.finish_reason] += 1
                tokens += len(result.tokens)
                if result.finish_reason == "stop" and not is_valid(result.text, schema):
                    wrong.append((seed, result.text))
                elif result.finish_reason == "error":
                    wrong.append((seed, result.error))
    with capsys.disabled():
        print(f"\n{model}: {dict(ends)}, {tokens:,} tokens, refused {dict(refused)}")
    assert not wrong
    assert ends["stop"] > 0.7 * SCHEMAS
    assert ends["stop"] + ends["length"] + refused.total() == SCHEMAS


def is_valid(text: str, schema: dict) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
