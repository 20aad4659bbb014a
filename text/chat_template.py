"""Render a chat template: a Jinja program that turns a conversation into a prompt.

A template comes with the weights, from an untrusted author. Jinja's sandbox keeps it away from
files and Python's internals, but it may still loop forever or produce gigabytes of text. So a
template is first checked in a child process (`untrusted_model_files.py`). A template that passes is
rendered here, in the thread of the request, never in the engine's thread.

A template may still be slow on a client's conversation: a loop over all pairs of 10,000 messages
makes 100 million iterations, and Jinja bounds only `range`. So `ClockChecks` inserts a check of the
clock into every loop, macro and block, and a rendering is stopped after `PATIENCE` seconds of
processor time. A check costs a third of a microsecond. A single expression between two checks is not
bounded.
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

PATIENCE = 1.0  # seconds of processor time for a rendering; normal templates take milliseconds


class PatienceError(jinja2.TemplateError):
    """Raised when a rendering takes too long."""


# The deadline is a variable of the template, under a name that no template can refer to
DEADLINE = "the deadline"
CHECK = "check the clock"  # the filter that checks the deadline; no template can refer to it either


@jinja2.pass_context
def check_clock(context: Context, _: None) -> None:
    if time.thread_time() > context.parent[DEADLINE]:
        raise PatienceError(f"it takes more than {PATIENCE:g} s; give less, or plain text")


class ClockChecks(NodeTransformer):
    """A transformer that inserts a check of the clock into every loop, macro and block."""

    def visit_For(self, node: nodes.For | nodes.Macro | nodes.Block) -> nodes.Node:
        at = {"lineno": node.lineno, "environment": node.environment}
        look = nodes.Filter(nodes.Const(None, **at), CHECK, [], [], None, None, **at)
        node.body.insert(0, nodes.ExprStmt(look, **at))
        return self.generic_visit(node)

    visit_Macro = visit_For
    visit_Block = visit_For


class Generation(jinja2.ext.Extension):
    """An extension for {% generation %}, which marks the assistant's messages for training. The tag is
    replaced by its body."""

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
    """Create Jinja's sandbox with Hugging Face's options."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    made.filters |= {"tojson": tojson, CHECK: check_clock}
    return made


class Template:
    """A chat template. Compiling and rendering it may raise any exception."""

    def __init__(self, source: str):
        made = sandbox()
        self._template = made.from_string(ClockChecks().visit(made.parse(source)))

    def render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({**variables, DEADLINE: time.thread_time() + PATIENCE})
