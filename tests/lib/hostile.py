"""Grammars that take much time or memory to compile, to follow, or both.

Some of them are legitimate and merely large. Neither kind may slow down other clients.
"""

import json
from typing import Any


def record(names: int, value: dict, **more) -> dict:
    properties = {f"k{n}": value for n in range(names)}
    return {"type": "object", "properties": properties, **more}


def chain(link, count: int) -> dict:
    """Return a schema with a chain of definitions, each of which refers to the next."""
    defs = {f"a{n}": link({"$ref": f"#/$defs/a{n + 1}"}) for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{count}": {"type": "string"}}}


def primes(*divisors: int) -> dict:
    return {"type": "integer", "allOf": [{"multipleOf": divisor} for divisor in divisors]}


def rules(count: int, body: str, last: str = '"a"') -> str:
    """Return a chain of rules. In `body`, N stands for the number of the next rule."""
    lines = [f"a{n}: {body.replace('N', str(n + 1))}" for n in range(count)]
    return "\n".join(["start: a0", *lines, f"a{count}: {last}"])


DIVISOR = {"type": "integer", "multipleOf": 100_000_007}
AMBIGUOUS = "start: start start | start start start | /[a-z ]/ | "

SCHEMAS: dict[str, Any] = {
    "a large divisor": DIVISOR,
    "a large common multiple": primes(101, 103, 107, 109),
    "a common multiple of 2,310": primes(2, 3, 5, 7, 11),
    "200 divisors": {"type": "array", "prefixItems": [{"multipleOf": 9_973}] * 200},
    "a long text": {"const": "x y" * 10_000},
    "many long texts": {"enum": ["x" * n for n in range(100, 250)]},
    "a huge enum": {"enum": [f"{n * 7919 % 10_007} of many" for n in range(1_500)]},
    "1,500 that may be left out": record(1_500, {}),
    "400 that may be left out": record(400, {"type": "integer"}),
    "one of 300 objects": {"anyOf": [record(3, {}, required=[f"k{n}"]) for n in range(300)]},
    "deep references": chain(lambda next: next, 900),
    "deep lists of references": chain(lambda next: {"items": {"items": {"items": next}}}, 450),
    "deep choices": chain(lambda next: {"anyOf": [{"type": "null"}, next]}, 450),
    "itself in many ways": {
        "$defs": {"a": {"anyOf": [{"items": {"$ref": "#/$defs/a"}}, {"$ref": "#/$defs/b"}, {}]}}
        | {"b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}, record(3, {})]}},
        "$ref": "#/$defs/a",
    },
    "a long list": {"type": "array", "minItems": 10**9},
    "long strings in long lists": {
        "type": "array",
        "items": {"type": "string", "minLength": 5_000, "maxLength": 20_000},
        "minItems": 5_000,
    },
    "a pattern of 2^30 states": {"type": "string", "pattern": "(a|b)*a(a|b){30}"},
    "nested repeats in a pattern": {"type": "string", "pattern": "((a{1,90}b?){1,90}c?){1,90}"},
}
REGEXES = {
    "nested repeats": "((a{1,500}){1,500}){1,500}",
    "an automaton of 2^30 states": "(a|b)*a(a|b){30}",
    "many automata": "|".join(f"(a|b|c)*{x}(a|b|c){{{n}}}" for n in range(8, 20) for x in "abc"),
    "a long alternation": "|".join(f"{n * 7919 % 100_003}[a-z]*" for n in range(2_500)),
    "words": "(\\w+ ){0,4000}",
}
LARKS = {
    "many ways to read it": AMBIGUOUS,
    "many ways, behind a long word": 'start: "' + "x" * 300 + '" a\na: a a | a a a | /[a-z ]/ | ',
    "two that need each other": 'start: a\na: a a | "a" | "b" | b\nb: a b | b a | "c" | ',
    "sums": 'start: e\ne: e ("+" | "*" | "-" | "/") e | /[0-9]/ | "(" e ")"',
    "blanks": "start: start start | / +/ | /[a-z]/ | ",
    "rules that double": rules(40, "aN aN"),
    "rules that may be empty": rules(450, 'aN aN | "b" | '),
    "rules in a row": rules(490, 'aN "b"'),
    "a schema in it": f"start: a\na: %json {json.dumps(DIVISOR)}",
    "terminals in a row": "start: A0\n"
    + "".join(f'A{n}: ("b" | A{n + 1})* "c"\n' for n in range(490))
    + 'A490: "a"',
}
HOSTILE: dict[str, dict[str, Any]] = {  # as `SamplingParams` expects them
    **{name: {"json": schema} for name, schema in SCHEMAS.items()},
    **{name: {"regex": regex} for name, regex in REGEXES.items()},
    **{name: {"lark": lark} for name, lark in LARKS.items()},
    "a choice of 4,000": {"choice": [f"c{n}" for n in range(4_000)]},
    "a choice of long ones": {"choice": [f"{n} " + "x y" * 100 for n in range(100)]},
}
FIELDS = {"json": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}
FIELDS |= {"choice": "guided_choice"}


def asked(name: str, number: int) -> dict[str, Any]:
    """Return a request's field with this grammar, varied by `number` so that no cache has it."""
    [(kind, source)] = HOSTILE[name].items()
    others = {
        "json": lambda: source | {"title": f"number {number}"},
        "choice": lambda: [*source, f"number {number}"],
        "regex": lambda: f"{source}|number {number}",
        "lark": lambda: f"{source}\n// number {number}\n",
    }
    return {FIELDS[kind]: others[kind]()}
