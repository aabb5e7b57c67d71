import sys

import pytest

from offbeat.services.chat.messages import ChatMessage, ToolCall
from offbeat.services.chat.template import ChatTemplate, UnusableError
from tests.services.gateway.templates import PLAIN, chat_template

FUNCTION = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


def test_whole_conversations_are_not_held_once_they_are_encoded():
    template = chat_template(PLAIN)
    conversation, phrase = "a long conversation " * 1000, "and now " * 3
    before = sys.getrefcount(conversation)
    assert template.encode(conversation) == template.encode("a long ") + template.encode(conversation[7:])
    assert sys.getrefcount(conversation) == before
    assert template.encode(phrase) is template.encode(phrase)


def test_a_history_has_the_calls_arguments_in_the_order_of_the_policy(hermes: ChatTemplate):
    text = '<tool_call>\n{"name": "f", "arguments": {"path": "a", "content": "b"}}\n</tool_call>'
    message = hermes.message_of(text, tools=(FUNCTION,))
    assert text in hermes.render([ChatMessage("user", "a"), message], (FUNCTION,), prompt=False)
    assert message.tool_calls == (ToolCall("f", '{"content":"b","path":"a"}'),)
    assert message.tool_calls != (ToolCall("f", '{"content":"a","path":"b"}'),)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"a": ' + "[" * 3000,
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": NaN}}',
    ],
    ids=["nested", "surrogate", "surrogate in the name", "infinite", "not a number"],
)
def test_a_call_that_no_client_could_read_stays_text(hermes: ChatTemplate, call: str):
    text = f"so: <tool_call>\n{call}\n</tool_call>"
    assert hermes.message_of(text, tools=(FUNCTION,)) == ChatMessage("assistant", text)


def test_a_conversation_that_is_too_deeply_nested_is_refused(hermes: ChatTemplate):
    deep = ChatMessage("assistant", "", (ToolCall("f", '{"a":' * 100_000 + "1" + "}" * 100_000),))
    with pytest.raises(UnusableError, match="recursion"):
        hermes.render([ChatMessage("user", "a"), deep], (FUNCTION,), prompt=True)
