"""Tool calls in forms that are no JSON, read by vLLM's parsers; the conversation continues as one sequence all the same."""

import pytest
from transformers import PreTrainedTokenizerFast

from offbeat.services.chat.messages import ChatMessage, normalize_arguments
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.chat.tool_parsers import load_parser
from offbeat.services.errors import RolloutError
from offbeat.services.gateway.session import ModelRequest
from tests.services.gateway.templates import Scripted, byte_tokenizer, session_of

PYTHONIC = r"""
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}[
{%- for call in m.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{{ ", " if not loop.last }}
{%- endfor %})
{{- ", " if not loop.last }}{% endfor %}]
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Llama 4's: calls are a list of Python's calls."""
TOOLS = (
    {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
)


@pytest.fixture(scope="module")
def fast() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), chat_template=PYTHONIC)


@pytest.fixture(scope="module")
def pythonic(fast: PreTrainedTokenizerFast) -> ChatTemplate:
    def render(messages: list, tools: list, prompt: bool) -> str:
        return fast.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )

    return ChatTemplate(render, fast.backend_tokenizer, parser=load_parser("pythonic", fast))


async def test_a_native_tool_call_and_its_result_stay_one_sequence(
    pythonic: ChatTemplate,
) -> None:
    policy = Scripted(pythonic, ['[look(way="up", far=2)]', "nothing there"])
    session = session_of(policy)
    messages = (ChatMessage("user", "look around"),)
    (first,) = await session.answer(ModelRequest(messages, TOOLS))
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.name, call.arguments) == ("look", normalize_arguments({"way": "up", "far": 2}))
    session.deliver([first])
    result = ChatMessage("tool", "a wall", tool_call_id=call.call_id)
    (second,) = await session.answer(ModelRequest((*messages, first.message, result), TOOLS))
    assert (second.message.content, second.finish_reason) == ("nothing there", "stop")
    session.deliver([second])
    captured = session.close()
    assert len(captured.segments) == 1
    assert captured.metrics["unverified_messages"] == 0


async def test_an_answer_that_the_parser_can_not_read_stays_words(pythonic: ChatTemplate) -> None:
    session = session_of(Scripted(pythonic, ["[look(way=", "words"]))
    (broken,) = await session.answer(ModelRequest((ChatMessage("user", "look"),), TOOLS))
    assert (broken.message.content, broken.message.tool_calls) == ("[look(way=", ())
    (words,) = await session.answer(ModelRequest((ChatMessage("user", "say"),), TOOLS))
    assert words.message.content == "words"


def test_a_parser_that_does_not_exist_is_refused_with_the_nearest_one(fast: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RolloutError, match=r"none named 'pythonik', did you mean 'pythonic'\?"):
        load_parser("pythonik", fast)


def test_a_parser_whose_tokens_the_tokenizer_has_not_is_refused(fast: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RolloutError, match="does not fit this tokenizer"):
        load_parser("jamba", fast)
