"""Random JSON schemas: nested objects and lists, enums, patterns, bounds, references, choices.

Most of them bound their strings and lists, so that a model that writes at random finishes.
"""

import random
from typing import Any

NAMES = ["name", "age", "tags", "id", "size", "näme", 'a "b"', "x/y", "on", "list of", "日", "k"]
PATTERNS = [
    "^[a-z]{1,6}$",
    "^[A-Z]{2}-[0-9]{2,4}$",
    "^(yes|no|maybe)$",
    "[0-9]",
    "^.{2,5}$",
    "a+b?$",
]
FORMATS = ["date", "time", "uuid", "ipv4", "date-time", "email"]


def random_schema(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    names = ["thing", "part", "leaf"][: dice.randint(0, 3)]
    # A definition refers only to later ones, or to itself from within a list.
    defs = {name: node(dice, 2, names[n + 1 :]) for n, name in enumerate(names)}
    if defs and dice.random() < 0.3:
        loop = {"type": "array", "items": {"$ref": f"#/$defs/{names[0]}"}, "maxItems": 1}
        defs[names[0]] = {"anyOf": [loop, {"type": "boolean"}]}
    schema = node(dice, 3, names) if dice.random() < 0.2 else record(dice, 3, names)
    return schema | {"$defs": defs} if defs else schema


def node(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    kinds = [text, number, whole, choice, plain, constant]
    if depth:
        kinds += [record, record, listed, listed, either, pair]
    if names:
        kinds += [reference]
    return dice.choice(kinds)(dice, depth, names)


def record(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = dice.sample(NAMES, dice.randint(0, 4))
    schema = {
        "type": "object",
        "properties": {key: node(dice, depth - 1, names) for key in keys},
        "required": [key for key in keys if dice.random() < 0.6],
    }
    if dice.random() < 0.85:
        schema["additionalProperties"] = False
    elif dice.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return schema


def listed(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    least = dice.randint(0, 2)
    return {
        "type": "array",
        "items": node(dice, depth - 1, names),
        "minItems": least,
        "maxItems": least + dice.randint(0, 2),
    }


def pair(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    items = [node(dice, depth - 1, names) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def either(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"anyOf": [node(dice, depth - 1, names) for _ in range(dice.randint(2, 3))]}


def reference(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{dice.choice(names)}"}


def text(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    kind = dice.random()
    if kind < 0.4:
        return {"type": "string", "pattern": dice.choice(PATTERNS)}
    if kind < 0.5:
        return {"type": "string", "format": dice.choice(FORMATS)}
    least = dice.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 8)}


def number(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    least = round(dice.uniform(-1000, 1000), dice.randint(0, 3))
    schema = {"type": "number", "minimum": least, "maximum": least + dice.choice([0, 0.5, 7, 1e4])}
    if dice.random() < 0.2:
        schema["exclusiveMinimum"] = schema.pop("minimum") - 1
    return schema


def whole(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    if dice.random() < 0.8:
        schema["minimum"] = dice.randint(-200, 200)
        schema["maximum"] = schema["minimum"] + dice.choice([0, 1, 9, 500, 10**9])
    if dice.random() < 0.15 and schema.get("maximum", 0) - schema.get("minimum", 0) > 100:
        schema["multipleOf"] = dice.choice([2, 5, 7])
    return schema


def choice(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    values = [
        "red",
        "grün",
        'say "hi"',
        "a\\b",
        "line\nend",
        1,
        2.5,
        None,
        True,
        [1, 2],
        {"k": "v"},
    ]
    return {"enum": dice.sample(values, dice.randint(1, 4))}


def constant(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"const": dice.choice(["x", 7, None, [], {"a": [1]}, "é"])}


def plain(dice: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"type": dice.choice(["boolean", "null", ["boolean", "null"]])}
