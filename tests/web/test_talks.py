"""The page treats conversations and files like the terminal's chat. These tests need no browser."""

import json
import random

import pytest
from browsers import in_node, needs_node

from cli.terminal_chat import Conversation, with_files

pytestmark = needs_node

FENCES = """
import { withFiles } from "./talks.js";
tell(asked.map(({ question, files }) => withFiles(question, files)));
"""


def test_files_are_sent_as_from_the_terminal():
    dice = random.Random(7)
    asked = []
    for _ in range(100):
        texts = ["".join(dice.choices("ab `\n", [1, 1, 1, 6, 1], k=30)) for _ in range(3)]
        files = [
            {"name": f"{i}.txt", "text": text}
            for i, text in enumerate(texts[: dice.choice([0, 1, 2])])
        ]
        asked.append({"question": f"what? {texts[2]}", "files": files})
    expected = [
        with_files(each["question"], {file["name"]: file["text"] for file in each["files"]})
        for each in asked
    ]
    assert in_node(FENCES, asked) == expected
    assert any("`````" in text for text in expected)


READS = """
import { readMessages } from "./talks.js";
tell(asked.map((text) => {
  try {
    const { system, turns } = readMessages(text);
    return [system, turns.map(({ question, content, reasoning_content: thought }) => [question, content, thought])];
  } catch (error) {
    return null;
  }
}));
"""
USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada"}
FILES = [
    [],
    [USER, ANSWER],
    [
        {"role": "system", "content": "Be short."},
        USER,
        ANSWER,
        USER,
        ANSWER | {"reasoning_content": "Easy."},
    ],
    [USER],
    [ANSWER, USER],
    [USER, USER],
    [USER, ANSWER | {"content": None}],
    [USER | {"content": [{"type": "text", "text": "Who?"}]}, ANSWER],
    [{"role": "system"}, USER, ANSWER],
    7,
]


def test_a_file_is_a_conversation_for_both_or_for_neither(tmp_path):
    texts = [json.dumps({"messages": messages}) for messages in FILES]
    texts += ["", "{", "[]", "null", '{"messages": null}', "[" * 5000]
    found = in_node(READS, texts)
    for text, page in zip(texts, found, strict=True):
        (tmp_path / "talk.json").write_text(text)
        if page is None:
            with pytest.raises(ValueError, match="is not a conversation"):
                Conversation.load(str(tmp_path / "talk.json"))
            continue
        terminal = Conversation.load(str(tmp_path / "talk.json"))
        turns = [
            [asked["content"], answer["content"], answer.get("reasoning_content", "")]
            for asked, answer in zip(terminal.turns[::2], terminal.turns[1::2], strict=True)
        ]
        assert page == [terminal.system, turns]
    assert sum(page is not None for page in found) == 3
