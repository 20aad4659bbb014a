"""The chat template: a program of another author's, tried in a child process before it is trusted.

The problem. A template comes with the weights, from anywhere. It is a program in Jinja's language,
which makes one text of a conversation. Jinja's sandbox keeps it away from files and from Python's
own names. But within the sandbox it may loop for ever, or ask for a text of gigabytes, and the
process would die of it with all its requests.

The way out. When a model is loaded, a child process renders some conversations with its template
(`tryout.py`). The system holds the child to limits, whatever the template does (`trials.py`). A
template that the child survives is trusted: this process renders it in Jinja's plain sandbox, in the
thread that asks and never in the one that steps.

What remains. A template may be quick on the trials and slow on a client's conversation: a loop over
all pairs of 10,000 messages is 100 million turns. (Jinja bounds a `range`, but no loops in loops.)
So `Turns` puts a look at the clock into every loop and macro, and a rendering ends when it has used
`PATIENCE`. A look costs a third of a microsecond, and nothing is counted. The clock is the
processor's, since a busy machine is not the template's fault. Between two looks a single
expression may take gigabytes, or minutes: an author can hide it from the trials, on purpose. Give a
server of models that you do not trust a limit of memory of its own.

Where next: `tokens.py`, which says when a template is used.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

PATIENCE = 1.0  # seconds of a processor for a rendering; an honest template takes milliseconds


class PatienceError(jinja2.TemplateError):
    """A rendering takes too long."""


UNTIL = "until when"  # among a template's variables, under a name that no template can write
TURN = "a turn"  # such a name, too


@jinja2.pass_context
def look_at_the_clock(context: Context, _: None) -> None:
    if time.thread_time() > context.parent[UNTIL]:
        raise PatienceError(f"it takes more than {PATIENCE:g} s; give less, or plain text")


class Turns(NodeTransformer):
    """Begins the body of all that may run again and again with a look at the clock."""

    def visit_For(self, node: nodes.For | nodes.Macro | nodes.Block) -> nodes.Node:
        at = {"lineno": node.lineno, "environment": node.environment}
        look = nodes.Filter(nodes.Const(None, **at), TURN, [], [], None, None, **at)
        node.body.insert(0, nodes.ExprStmt(look, **at))
        return self.generic_visit(node)

    visit_Macro = visit_For
    visit_Block = visit_For


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said, for training. Here it is replaced by what it
    encloses."""

    tags: ClassVar = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str):
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def sandbox() -> ImmutableSandboxedEnvironment:
    """Jinja's, with the options of Hugging Face."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    made.filters |= {"tojson": tojson, TURN: look_at_the_clock}
    return made


class Template:
    """A chat template. Making one and rendering it may raise anything: it is another author's
    program."""

    def __init__(self, source: str):
        made = sandbox()
        self._template = made.from_string(Turns().visit(made.parse(source)))

    def render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({**variables, UNTIL: time.thread_time() + PATIENCE})
