"""Conversations through a model's own template: the prompt equals that of `transformers`, and a template
cannot escape its sandbox.

The templates here imitate published ones, including their whitespace control. If a prompt differs from the
training by one space, answers get worse, and nothing shows the reason. So texts and ids are compared with
those of `transformers`. No test may access the network.
"""

import datetime
import itertools
import json
import re
import socket
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
from checkpoints import BOS, make_tokenizer
from tokenizers import AddedToken, processors

from base.untrusted_files import ModelError
from experiments.simulator import Replay
from nanobatch import Tokenizer
from policies import POLICIES
from prefix import SEGMENT
from request import Request
from sched import Scheduler
from text import untrusted_model_files
from text.tool_formats import PROBE, TOOLS

ROOT = Path(__file__).parents[2]
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}\
{% for message in turns %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.first and system is not false %}\
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

CHATML = """\
{% if not messages[0].role == 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

EVERYTHING = """\
{#- A comment, and all that a template may use. -#}
{%- macro wrap(role, text) -%}
    <|im_start|>{{ role }}
{{ text }}<|im_end|>
{%- endmacro -%}
{%- set state = namespace(count=0, last=none, roles=[]) -%}
{{ bos_token }}Today is {{ strftime_now('%d %b %Y') }}.
  {% for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if state.count >= 4 %}{{ ' ...' }}{% break %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {%- set state.last = message.role %}
    {%- set state.roles = state.roles + [message['role'] | upper] %}
    {{+ wrap(message.role, message.content | trim) }}
    {{- message | tojson }}
    {{- message | tojson(indent=2) }}
    {{- {'é': message.content, 'a': [1, none, true, '<&>\\u2028']} | tojson(sort_keys=true, separators=(',', ':')) }}
    {{- message.content | tojson(ensure_ascii=true) }}
  {% endfor %}
{{ state.roles | join(', ') }}, {{ state.count }} turns, the last by {{ state.last }}
{% if tools is none %}without tools{% else %}with tools{% endif %}
{% if documents is none %}without documents{% endif %}
{% if cls_token is defined %}{{ cls_token }}{% else %}no cls{% endif %}
{{ unk_token is defined }} {{ pad_token }} {{ add_bos_token is defined }}
{% for key, value in (messages | first).items() | sort %}{{ key }}={{ value | string | length }};{% endfor %}

{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}
{{- '\\n<|im_start|>assistant\\n' if add_generation_prompt }}
"""

# What newer families' templates use in addition: modes, reasoning that is left out of old turns, tools.
NEWER = r"""
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set budgets = {'0': 'none', 512: 'little', 'more': 'much'} -%}
{%- macro turn(role, text='', end='<|im_end|>') -%}
<|im_start|>{{ varargs | length }}{{ role }}{{ '\n' ~ text ~ end }}
{%- endmacro -%}
{%- macro framed(title) -%}[{{ title }}: {{ caller() }}]{%- endmacro -%}
{%- set first = messages[0]['content'] if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set ns = namespace(last=rest | length - 1, looks=true, tools=xml_tools is defined) -%}
{%- for message in rest[::-1] -%}
    {%- set place = (rest | length - 1) - loop.index0 -%}
    {%- if ns.looks and message.role == "user" and message.content is string -%}
        {%- set ns.looks = false -%}{%- set ns.last = place -%}
    {%- endif -%}
{%- endfor -%}
{%- if '/quiet' in first %}{% set mode = 'quiet' %}{% set first = first.replace('/quiet', '').rstrip() %}
{%- else %}{% set mode = 'loud' %}{% endif -%}
{{ bos_token }}{% call framed('system ' + mode) %}{{ first | trim | default('nothing', true) }}{% endcall %}
{%- for message in rest -%}
    {%- if message.content is not string and message.content is not iterable -%}
        {{- raise_exception("content of " + message.role) -}}
    {%- endif -%}
    {%- if (message.role == 'assistant') == (loop.index0 % 2 == 0) -%}{{- raise_exception('turns') -}}{%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- set text = message.content.split('</think>')[-1].lstrip('\n') -%}
    {%- if loop.index0 > ns.last or (loop.last and not loop.first) -%}{%- set text = text.strip('\n') -%}{%- endif -%}
    {{- turn(role, text, end=eos_token if loop.last else '<|im_end|>') -}}
    {%- if message.name is defined and message.name.startswith('A') %} {{ message.name[:2] }}{% endif -%}
    {%- generation -%}{{ loop.length - loop.revindex }}{%- endgeneration -%}
    {%- if loop.nextitem is defined and loop.nextitem.role == message.role %}{% continue %}{% endif -%}
{%- endfor -%}
{%- for key, value in budgets.items() %}{{ key | string | int(default=7) }}={{ value.upper() }};{% endfor -%}
{{ messages | map(attribute='role') | unique | join('/') }}
{{ messages | rejectattr('role', 'in', ['user']) | list | count }}
{{ (messages | last)['content'] | length }} {{ strftime_now('%B %Y') | length > 7 }}
{{ [3, 1] | sort | tojson(indent=4) }}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>model\n' -}}{%- if not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif -%}
{%- endif -%}
"""

TEMPLATES = {
    "llama 2": LLAMA2,
    "llama 3": LLAMA3,
    "chatml": CHATML,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "everything": EVERYTHING,
    "newer": NEWER,
}


def turns(*contents: str, system: str | None = None) -> list[dict]:
    """Return a conversation in which user and assistant take turns."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)
    ]


CONVERSATIONS = {
    "one turn": turns("Hello!"),
    "with a system prompt": turns("Hello!", system="You answer in one word."),
    "three turns": turns("What is 1 + 1?", "2", "And 2 + 2?"),
    "five turns and a system prompt": turns("a", "b", "c", "d", "e", system="Be terse."),
    "unicode": turns(
        "Grüße 👩‍👩‍👧, 中文？", "🇩🇪 e\u0301 \u2028", "क्षि\u00a0\ufffd", system="ÄÖÜ \U0001d518"
    ),
    "spaces at both ends": turns(
        "  two before, one after ", "\n\tan answer \n", " ", system="  \n system \n "
    ),
    "empty": turns("", "", "", system=""),
    "quotes, braces and markup": turns(
        "{{ 1 + 1 }} {% raw %} \"'\\ <b>&amp;</b>", "{# #}", "</script>\r\n\r"
    ),
    "special tokens that the user types": turns("<s> </s> <|im_end|> [INST]", "<|eot_id|>", "<s>"),
    "ends with the assistant": turns("Hello!", "Hi."),
    "other fields": [
        {"role": "user", "content": "Hi", "name": "Ann", "n": 1.5, "tags": ["x", {"y": None}]}
    ],
}
PLACES = ("a file", "the config", "the config's list")
every_conversation = pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail a test in which our code or the reference accesses the network. A template is on disk, with its
    model."""

    def refuse(*args, **kwargs):
        raise AssertionError("a test touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def no_check(monkeypatch):
    checker = untrusted_model_files.TemplateChecker
    monkeypatch.setattr(checker, "template", lambda *_: ("", []))
    monkeypatch.setattr(checker, "tokenizer", lambda *_: "")


# Skip the check in a child process, which takes half a second and does not change the text
unchecked = pytest.mark.usefixtures("no_check")


def make_model(
    folder: Path,
    template=None,
    place: str = "the config",
    adds_bos: bool = True,
    as_dict: bool = False,
    **config,
) -> Tokenizer:
    """Write the files of a model folder that concern its text. `as_dict` writes the special tokens as older
    configs do."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    more = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    more += ["<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in more])
    if not adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {"unk_token": None, "add_bos_token": adds_bos}
    for name, token in (("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "</s>")):
        config[name] = (
            {"__type": "AddedToken", "content": token, "lstrip": False, "special": True}
            if as_dict
            else token
        )
    if place == "a file" and template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif place == "the config" and template is not None:
        config["chat_template"] = template
    elif template is not None:
        others = [
            {"name": "rag", "template": "documents"},
            {"name": "tool_use", "template": "tools"},
        ]
        config["chat_template"] = [others[0], {"name": "default", "template": template}, others[1]]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder, tokenizer.get_vocab_size())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a function that makes a model of each template once, because loading takes longer than
    rendering."""

    @cache
    def made(name: str, adds_bos: bool = True) -> Tokenizer:
        template = TEMPLATES.get(name) or READS[name][0]
        return make_model(tmp_path_factory.mktemp("published"), template, adds_bos=adds_bos)

    return made


@cache
def transformers_of(folder: Path):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def reference(folder: Path, messages: list[dict]) -> tuple[str, list[int]]:
    """Return text and ids as `transformers` renders the same folder and messages."""
    tokenizer = transformers_of(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    return text, list(ids if isinstance(ids, list) else ids["input_ids"])


# --- against transformers -------------------------------------------------------------------------


@every_conversation
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversation_equals_transformers(published, name, messages):
    """Whitespace control, HTML escapes and missing variables are handled as in `transformers`."""
    text = published(name)
    before = json.dumps(messages)
    assert (text.render(messages), text.encode_chat(messages)) == reference(text.folder, messages)
    assert len(text.render(messages)) > 8 and json.dumps(messages) == before


@unchecked
@pytest.mark.parametrize(("adds_bos", "as_dict"), [(True, True), (False, False)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "says_eos"), [("llama 2", True), ("chatml", False)])
def test_template_in_three_places(tmp_path, name, says_eos, place, as_dict, adds_bos):
    """Published models have the template in a file, in the config, or in the config as one of several named
    ones."""
    text = make_model(tmp_path, TEMPLATES[name], place, adds_bos, as_dict)
    messages = CONVERSATIONS["five turns and a system prompt"]
    rendered = text.render(messages)
    assert (rendered, text.encode_chat(messages)) == reference(tmp_path, messages)
    assert text.has_template and "Be terse." in rendered
    assert ("</s>" in rendered) == says_eos


PLAIN_CHAT = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}\n"
FOR_TOOLS = """
{%- macro title(tool) %}{{ tool.function.name }}{% endmacro %}
{% for tool in tools %}
{{ title(tool) }}
{% endfor %}
{%- for m in messages %}<|user|>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endfor %}
"""


@pytest.mark.parametrize("place", ["a file", "several with names"])
def test_separate_template_for_tools(tmp_path, place):
    """Hermes is published with a second template for tools, which cannot render a chat without tools."""
    make_model(tmp_path, PLAIN_CHAT, place)
    if place == "a file":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)
    else:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (named,) = [each for each in config["chat_template"] if each["name"] == "tool_use"]
        named["template"] = FOR_TOOLS
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = Tokenizer(tmp_path, 300)
    assert text.output_format.tools.name == "Hermes"
    for tools in (TOOLS, []):
        for messages in (turns("x"), PROBE):
            theirs = transformers_of(tmp_path).apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
            assert text.render(messages, tools) == theirs
            assert ("is_listed" in theirs) == bool(tools)


def test_broken_template_for_tools(tmp_path):
    make_model(tmp_path, PLAIN_CHAT, "a file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{% for x in %}")
    text = Tokenizer(tmp_path, 300)
    assert text.has_template and text.render(turns("x")) == "<|user|>x<|end|>"
    assert text.output_format.why == "this model's chat template does not accept tools"


@unchecked
def test_template_file_wins_over_config(tmp_path):
    """A model that was saved again by a newer library may have both, and the template in the config is the
    old one."""
    text = make_model(tmp_path, "old", chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    text = Tokenizer(tmp_path, 300)
    assert text.render(turns("x")) == reference(tmp_path, turns("x"))[0] == "new x"


@unchecked
def test_template_in_a_file_of_its_own_as_json(tmp_path):
    """Regression: Mistral Small 3.1 has its template only there, and had none for us."""
    make_model(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN_CHAT}))
    assert Tokenizer(tmp_path, 300).render(turns("x")) == "<|user|>x<|end|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert Tokenizer(tmp_path, 300).render(turns("x")) == "config"


def test_template_as_json_is_checked(tmp_path):
    make_model(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 1"}))
    text = Tokenizer(tmp_path, 300)
    assert not text.has_template and f"{tmp_path / 'chat_template.json'}: the chat" in text.unfit


@unchecked
def test_special_tokens_map(tmp_path):
    """`bos_token` is also read from special_tokens_map.json. Otherwise it would be undefined in the template,
    and the prompt would have no BOS."""
    make_model(tmp_path, LLAMA3)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": LLAMA3}))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    text = Tokenizer(tmp_path, 300)
    assert (text.render(turns("x")), text.encode_chat(turns("x"))) == reference(
        tmp_path, turns("x")
    )
    assert text.encode_chat(turns("x")).count(BOS) == 1


@unchecked
def test_strftime_now(tmp_path):
    text = make_model(tmp_path, "{{ strftime_now('%Y-%m-%d') }}")
    days = [str(datetime.date.today()), text.render(turns("x")), str(datetime.date.today())]
    assert days[1] in (days[0], days[2])


@unchecked
def test_null_field_counts_as_missing(tmp_path):
    """OpenAI's clients send `content: null` along with tool calls. It is rendered as an empty text, not as
    "None"."""
    messages = [*turns("Hi"), {"role": "assistant", "content": None}, *turns("And?")]
    text = make_model(tmp_path, CHATML.replace("message.content", "(message.content or '')"))
    assert text.render(messages) == reference(tmp_path, messages)[0]
    text = make_model(
        tmp_path / "2", "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    said = "user:Hi;assistant:;user:And?;"
    assert text.render(messages) == reference(tmp_path / "2", messages)[0] == said


@unchecked
def test_generation_tag(tmp_path):
    """`{% generation %}` is Hugging Face's own tag: it marks the text to train on, and renders nothing."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}\n{{ m.content }}{% endgeneration %}"
        "\n{% else %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    text = make_model(tmp_path, source)
    assert text.render(turns("a", "b", "c")) == reference(tmp_path, turns("a", "b", "c"))[0]


# --- BOS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama 3", 1),
        ("mistral", 1),
        ("newer", 1),
        ("chatml", 0),
        ("zephyr", 0),
        ("llama 2", 2),  # one per user turn
    ],
)
def test_bos_is_where_the_template_writes_it(published, name, count, adds_bos):
    """The tokenizer adds no BOS to a rendered prompt, because with two of them a model silently gets worse."""
    ids = published(name, adds_bos).encode_chat(turns("Hello!", "Hi.", "Bye."))
    assert ids.count(BOS) == count and ids[1] != BOS


# --- prompts as a user types them -----------------------------------------------------------------


@unchecked
def test_typed_prompt_is_a_user_message(tmp_path):
    text = make_model(tmp_path, CHATML)
    assert text.ask("Hi") == text.encode_chat(turns("Hi")) != text.encode("Hi")
    assert text.ask(" ") == text.encode_chat(turns(" "))


@unchecked
def test_raw_prompt_is_plain_text(tmp_path):
    text = make_model(tmp_path / "1", CHATML)
    assert text.ask("Hi", raw=True) == text.encode("Hi")
    text = make_model(tmp_path / "2")
    assert text.ask("Hi") == text.ask("Hi", raw=True) == text.encode("Hi")


@unchecked
@pytest.mark.parametrize("template", [CHATML, None])
@pytest.mark.parametrize("raw", [True, False])
def test_empty_prompt_has_no_tokens(tmp_path, template, raw):
    """An empty prompt is not rendered and gets no BOS, so that the engine can refuse it."""
    assert make_model(tmp_path, template).ask("", raw) == []


# --- refusals -------------------------------------------------------------------------------------


def refusal(text: Tokenizer, messages, kind: type = ValueError) -> str:
    """Assert that `render` and `encode_chat` both reject a conversation. Return the one-line message."""
    with pytest.raises(kind) as caught:
        text.render(messages)
    with pytest.raises(kind):
        text.encode_chat(messages)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@unchecked
@pytest.mark.parametrize("template", [None, [], [{"name": "x"}], 17, {"default": "x"}])
def test_no_template_no_conversation(tmp_path, template):
    text = make_model(tmp_path, template)
    assert not text.has_template
    assert "no chat template" in refusal(text, turns("Hi"))
    assert text.encode("Hi") == [BOS, *make_tokenizer().encode("Hi", add_special_tokens=False).ids]


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("llama 2", turns("a", "b")[::-1], "Roles must alternate"),
        ("llama 2", turns("a") * 2, "Roles must alternate"),
        ("mistral", turns("a", "b")[::-1], "conversation roles must alternate"),
    ],
)
def test_template_error_reaches_the_caller(published, name, messages, words):
    assert words in refusal(published(name), messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ messages",
        "{% for m in messages %}",
        "x\n\n{% nonsense %}\ny",
        "{{ x | nonsense }}",
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_template_syntax_error_names_the_folder(tmp_path, place, source):
    """The client cannot fix a broken template, so the error is a ModelError that names the model."""
    text = make_model(tmp_path / "the-model", source, place)
    message = refusal(text, turns("Hi"), ModelError)
    assert "the-model" in message


@pytest.mark.parametrize(
    "messages",
    [
        ["Hi"],
        [None],
        [17],
        [["user", "Hi"]],
        [{}],
        [{"content": "Hi"}],
        [{"role": None, "content": "Hi"}],
        [{"role": 1, "content": "Hi"}],
        [*turns("Hi"), ("role", "user")],
        "Hi",
    ],
)
def test_invalid_chat_messages_are_refused(published, messages):
    assert "role" in refusal(published("chatml"), messages)


@pytest.mark.parametrize("name", ["llama 2", "chatml", "mistral", "everything"])
def test_message_without_content(published, name):
    refusal(published(name), [{"role": "user"}])


@unchecked
@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{{ range(10 ** 6) | list }}",
        "{{ '{nothing}'.format() }}",
        "{{ '{0} {1}'.format(1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages.content.content }}",
        "{{ 1 + 'a' }}",
        "{{ strftime_now(1) }}",
        "{{ messages | tojson(indent=messages) }}",
        "{{ nothing() }}",
        "{% include 'x' %}",
    ],
)
def test_any_template_failure_is_a_refusal(tmp_path, source):
    """Any exception in a template becomes a ValueError, which callers catch. Another exception would end the
    server."""
    refusal(make_model(tmp_path, source), turns("Hi"))


@unchecked
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages['__class__']['__base__'] }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ lipsum.__globals__['os'].popen('true').read() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__.json }}",
        "{{ strftime_now.__code__.co_filename }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{% set f = '{0.__class__.__mro__}'.format %}{{ f('') }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{% set _ = messages[0].pop('role') %}",
    ],
)
def test_template_cannot_escape_the_sandbox(tmp_path, source):
    """Templates come with weights from anywhere, so rendering one must not run arbitrary code."""
    messages = turns("Hi")
    message = refusal(make_model(tmp_path, source), messages)
    assert "<class" not in message and "/" not in message.replace(str(tmp_path), "")
    assert messages == turns("Hi")


MILLION = "{% set x = 'a' * 10 ** 6 %}"
GROWS = "{% set s = namespace(x=START) %}{% for _ in range(60) %}{% set s.x = STEP %}{% endfor %}"
LOOP = "{% for i in range(10 ** 5) %}"
ENDLESS = [
    LOOP * 2 + "{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set s = namespace(n=60) %}{% block b %}{% set s.n = s.n - 1 %}{% if s.n %}"
    "{{ self.b() }}{{ self.b() }}{% endif %}{% set s.n = s.n + 1 %}{% endblock %}",
    LOOP + "{% set x = range(10 ** 5) | list | sort %}{% endfor %}",
]
# Each runs in a single C operation, which only the system can stop
UNSTOPPABLE = [
    "{{ 10 ** (10 ** 9) }}",
    GROWS.replace("START", "7").replace("STEP", "s.x * s.x"),
    "{{ [1] | slice(10 ** 9) | list }}",
]
HUGE = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ 'a' | indent(10 ** 9, true) }}",
    MILLION + "{{ x | replace('a', x) }}",
    MILLION + "{% for i in range(1000) %}{{ x }}{% endfor %}",
    GROWS.replace("START", "'a'").replace("STEP", "s.x ~ s.x"),
]
# No sample conversation has two messages, so the check at load does not run this part
HIDDEN = "{%% if messages | length == 2 %%}%s{%% endif %%}fine"
no_limit_of_memory = pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no such limit")


def unfit(text: Tokenizer) -> str:
    """Return the reason why a template is not used. Assert that plain text still works."""
    assert not text.has_template
    assert text.ask("Hi", raw=True) == text.encode("Hi")
    with pytest.raises(ModelError):
        # The model was not trained on plain text, which must not silently replace the template
        text.ask("Hi")
    line = refusal(text, turns("Hi"), ModelError)
    assert line == text.unfit and "the chat template" in line and "give plain text" in line
    assert str(text.folder / "tokenizer_config.json") in line
    return line


@pytest.mark.parametrize("source", [ENDLESS[0], *UNSTOPPABLE])
def test_endless_template_is_found_at_load(tmp_path, monkeypatch, source):
    """Regression: a slow template was first detected in a client's conversation, which blocked a thread of
    the server."""
    limits = untrusted_model_files.LIMITS._replace(seconds=0.3)
    monkeypatch.setattr(untrusted_model_files, "LIMITS", limits)
    line = unfit(make_model(tmp_path, source))
    assert "takes more than 0.3 s for a sample conversation" in line


@no_limit_of_memory
@pytest.mark.parametrize("source", HUGE)
def test_greedy_template_is_found_at_load(tmp_path, source):
    """A process that runs out of memory dies with all its requests. On a machine that allocates memory
    slowly, the time limit is reached first."""
    line = unfit(make_model(tmp_path, source))
    assert re.search(r"takes more than (512 MB|\d+ s) for a sample conversation", line), line


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script", ["exec sleep 60", None])
def test_load_without_a_child_process_is_refused(tmp_path, monkeypatch, script):
    """If no child process can be started, template and tokenizer cannot be checked, so the model is refused."""
    python = executable(tmp_path / "python", script) if script else str(tmp_path / "nothing")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr("base.sandbox.START", 0.2)
    monkeypatch.setattr(untrusted_model_files, "PASSED", set())
    said = r"the tokenizer cannot be checked \(cannot start a process \("
    with pytest.raises(ModelError, match=said + ("timed out" if script else "")):
        make_model(tmp_path / "model", CHATML)


def test_only_the_demo_template_needs_no_check(tmp_path, monkeypatch):
    """The demo's template is as trusted as the program, and a child process would delay the start."""
    asked = []

    def note(child, source: str, _) -> tuple[str, list[str]]:
        asked.append(source)
        return "", []

    monkeypatch.setattr(untrusted_model_files.TemplateChecker, "template", note)
    ours = (ROOT / "demo" / "model" / "chat_template.jinja").read_text()
    assert make_model(tmp_path / "1", ours, "a file").has_template and not asked
    assert make_model(tmp_path / "2", f"{ours} ", "a file").has_template
    assert asked == [f"{ours} "]


# --- limits of a trusted template -----------------------------------------------------------------


@unchecked
@pytest.mark.parametrize("source", ENDLESS)
def test_slow_rendering_is_stopped_in_any_thread(tmp_path, monkeypatch, source):
    """Regression: four slow conversations blocked all of a server's threads that parse prompts for a
    minute. A signal would not help, because it reaches only the main thread."""
    monkeypatch.setattr("text.chat_template.PATIENCE", 0.1)
    text, said = make_model(tmp_path, HIDDEN % source), []
    assert text.render(turns("a")) == text.render(turns("a", "b", "c")) == "fine"

    def render() -> None:
        said.append(refusal(text, turns("Hi", "Hello.")))

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    render()
    thread.join(60)
    assert len(said) == 2 and all("takes more than 0.1 s" in line for line in said)
    assert text.render(turns("a")) == "fine"


@unchecked
def test_quadratic_template_is_stopped(tmp_path, monkeypatch):
    """A quadratic template is fast on the short conversations of the check, and is stopped on a long one."""
    monkeypatch.setattr("text.chat_template.PATIENCE", 0.1)
    pairs = "{% for a in messages %}{% for b in messages %}{% if a == b %}{% endif %}{% endfor %}"
    text = make_model(tmp_path, pairs + "{{ a.content }}{% endfor %}")
    assert text.render(turns("x", "y")) == "xy"
    assert "takes more than 0.1 s" in refusal(text, turns(*["x"] * 10_000))


@unchecked
def test_busy_machine_does_not_stop_a_template(tmp_path, monkeypatch):
    """Regression: on a busy machine a normal template was reported as endless, because the limit was
    wall-clock time."""
    text, wall = make_model(tmp_path, EVERYTHING), itertools.count(0, 10)
    with monkeypatch.context() as patch:
        patch.setattr("text.chat_template.time.monotonic", lambda: next(wall))
        assert "Hello" in text.render(CONVERSATIONS["one turn"])


@unchecked
@pytest.mark.parametrize("name", ["llama 2", "everything"])
def test_limits_are_far_from_normal_use(tmp_path, name):
    """A million characters, which is more than most models support, are rendered within the limits."""
    text = make_model(tmp_path, TEMPLATES[name])
    messages = turns(*["some words of a turn, " * 450] * 101)
    assert sum(len(message["content"]) for message in messages) > 999_000
    assert len(text.render(messages)) > (999_000 if name != "everything" else 100_000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ messages" + " | string" * 3000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
        "x" * 1_000_001,
    ],
    ids=lambda source: source[:12],
)
def test_oversized_template_is_refused(tmp_path, source):
    """Regression: compiling such a template raised a RecursionError, which nothing caught."""
    assert str(tmp_path) in refusal(make_model(tmp_path, source), turns("Hi"), ModelError)


@unchecked
@pytest.mark.parametrize(
    "what", ["''", "messages", "raise_exception", "strftime_now", "range", "self"]
)
def test_python_attributes_are_undefined(tmp_path, what):
    own = ["__class__", "__init__", "__dict__", "__globals__", "__subclasses__", "_x"]
    source = [f"[{{{{ {what}.{each} }}}}{{{{ {what}['{each}'] }}}}]" for each in own]
    assert make_model(tmp_path, "".join(source)).render(turns("Hi")) == "[]" * len(own)


# --- what each turn prefills ----------------------------------------------------------------------

# Reasoning of earlier turns is left out, as in Qwen 3
THINKS = """\
{%- set ns = namespace(last=0) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.reasoning_content and loop.index0 > ns.last -%}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
GEMMA = """\
{{ bos_token }}{% for message in messages %}\
{% set role = 'model' if message.role == 'assistant' else message.role %}\
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
PHI3 = """\
{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
DEMO = (ROOT / "demo" / "model" / "chat_template.jinja").read_text()
# For each family: the template, the text before the answer, and the number of tokens prefilled in the second
# turn, the tenth, and the tenth with a system message. A token is a character or a mark of the template
READS = {
    "llama 2": (LLAMA2, " ", (22, 22, 22)),
    "llama 3": (LLAMA3, "", (38, 38, 38)),
    "chatml": (CHATML, "", (57, 57, 57)),
    "mistral": (MISTRAL, " ", (19, 19, 64)),
    "zephyr": (ZEPHYR, "", (35, 35, 35)),
    "qwen 3": (THINKS, "<think>\nEasy.\n</think>\n\n", (39, 39, 39)),
    "gemma": (GEMMA, "", (84, 84, 84)),
    "phi 3": (PHI3, "", (35, 35, 35)),
    "the demo": (DEMO, "", (31, 31, 31)),
}


class Talk(Replay):
    """A replay with one slot and given answers instead of a model."""

    def say(self, prompt: list[int], answer: list[int]) -> Request:
        request = Request(self.sched.steps, tuple(prompt), len(answer), self.now)
        self.answer = answer
        self._tokens[request.id] = len(answer)
        self.sched.submit(request)
        for _ in self:
            pass
        return request

    def run(self, plan):
        last = len(self.answer) - 1
        return {
            each.slot: [self.answer[min(each.request.planned - 1, last)]] for each in plan.emitters
        }  # a ghost repeats the last token


@pytest.mark.parametrize("name", READS)
def test_rendering_is_stateless(published, name):
    """A turn prefills everything except the rows still in its slot, which end with the last word of the answer.
    For Llama 3, 1 + 8 + 15 + 14 tokens are prefilled:

        <|eot_id|> <|start_header_id|>user<|end_header_id|>\\n\\n What is 17 + 6?
        <|eot_id|><|start_header_id|>assistant<|end_header_id|>\\n\\n

    Qwen's template leaves out the reasoning of earlier turns, so the answer after the reasoning is prefilled
    again. Mistral's writes the system message into the newest question, so the previous question and answer
    are prefilled again.
    """
    _, opens, expected = READS[name]
    text = published(name)
    end = text.encode("</s>")[-1:]
    read = []
    for system in (None, "You answer in one word."):
        talk = Talk(Scheduler(slots=1, max_len=4096, policy=POLICIES["continuous"]))
        messages = turns(system=system)
        held: list[int] = []
        for turn in range(10):
            messages.append({"role": "user", "content": "What is 17 + 6?"})
            prompt = text.encode_chat(messages)
            answer = text.encode(opens + "So.")[1:] + end
            request = talk.say(prompt, answer)
            same = [a == b for a, b in zip(prompt, held, strict=False)]
            common = [*same, False].index(False)
            assert request.prefix.cached == (common if common >= SEGMENT else 0)
            held = prompt + answer[:-1]
            reply = {"role": "assistant", "content": "So."}
            messages.append(reply | ({"reasoning_content": "Easy."} if "think" in opens else {}))
            if turn in (1, 9):
                read.append(len(prompt) - request.prefix.cached)
    second, tenth, _, tenth_with_system = read
    assert (second, tenth, tenth_with_system) == expected
