"""Which tokens of a conversation are the assistant's, by the templates of well-known models."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.chat.assistant_tokens import AssistantTokens, ConversationError

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""  # noqa: E501
"""Qwen2.5's, with a shorter text about tools."""
LLAMA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Llama 3's."""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""Mistral 7B Instruct v0.2's."""
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3's, thoughts of earlier turns are left out."""
OPENED_THOUGHT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""As DeepSeek-R1's: the generation prompt opens a thought, and answers are shown without theirs."""

DIALOGUE = [
    {"role": "user", "content": "Where is G ?"},
    {"role": "assistant", "content": "Down  of P."},
    {"role": "user", "content": "And O ?"},
    {"role": "assistant", "content": "Right"},
]


def load(folder: Path, template: str, *, bos: str = "<|im_start|>", eos: str = "<|im_end|>") -> AssistantTokens:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    special += ["<|eot_id|>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(["assistant user system Down Right Where is G"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return AssistantTokens(folder)


def texts(tokens: AssistantTokens, messages: list[Any], tools: list[Any] | None = None, **options: Any) -> list[str]:
    ids, turns, _ = tokens.tokenize(messages, tools or [], **options)
    return [tokens._backend.decode(ids[start:end], skip_special_tokens=False) for start, end in turns]


FAMILIES = {
    "qwen2.5": (QWEN, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA, "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "mistral": (MISTRAL, "<s>", "</s>", "</s>"),
    "tagged": (TAGGED, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_and_its_end_are_the_assistants(family: str, tmp_path: Path):
    template, bos, eos, end = FAMILIES[family]
    tokens = load(tmp_path, template, bos=bos, eos=eos)
    space = " " if family == "mistral" else ""
    assert texts(tokens, DIALOGUE) == [f"{space}Down  of P.{end}", f"{space}Right{end}"]
    assert texts(tokens, DIALOGUE, last_only=True) == [f"{space}Right{end}"]
    assert texts(tokens, DIALOGUE, first=2) == [f"{space}Right{end}"]


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "tagged"])
def test_the_tokens_before_an_answer_are_the_prompt_of_a_rollout(family: str, tmp_path: Path):
    template, bos, eos, _ = FAMILIES[family]
    tokens = load(tmp_path, template, bos=bos, eos=eos)
    chat = load_chat_format(tmp_path)
    ids, turns, _ = tokens.tokenize(DIALOGUE[:2])
    prompt = chat.first_prompt("", str(DIALOGUE[0]["content"]))
    assert tuple(ids[: turns[0][0]]) == prompt
    assert tuple(ids[turns[0][0] : turns[0][1]]) == (*chat.encode("Down  of P."), chat.end_id)


@pytest.mark.parametrize("arguments", [{"at": "G"}, '{"at":"G"}', '{ "at": "G" }'], ids=["object", "text", "spaces"])
@pytest.mark.parametrize("printed", ["tool_call.arguments | tojson", "tool_call.arguments"])
def test_calls_of_tools_are_learned_and_their_results_not(arguments: Any, printed: str, tmp_path: Path):
    """By templates that take the arguments as an object and as JSON, whichever the row has."""
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Where is G ?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Down"},
        {"role": "assistant", "content": "Down ."},
    ]
    learned = texts(load(tmp_path, QWEN.replace("tool_call.arguments | tojson", printed)), messages, [tool])
    given = '{"at": "G"}' if "tojson" in printed else '{"at":"G"}'  # as a rollout's
    call_text = f'\n<tool_call>\n{{"name": "look", "arguments": {given}}}\n</tool_call><|im_end|>'
    assert learned == [call_text.removeprefix("\n"), "Down .<|im_end|>"]


@pytest.mark.parametrize("arguments", [{"at": datetime.date(2026, 1, 1)}, {"at": float("nan")}, "[1]"])
def test_arguments_that_are_no_json_object_are_refused_for_a_template_of_text(arguments: Any, tmp_path: Path):
    call = {"function": {"name": "look", "arguments": arguments}}
    tokens = load(tmp_path, QWEN.replace("tool_call.arguments | tojson", "tool_call.arguments"))
    with pytest.raises(ConversationError, match="arguments of a tool call are no JSON object"):
        tokens.tokenize([DIALOGUE[0], {**DIALOGUE[1], "tool_calls": [call]}])


def test_a_conversation_ends_at_its_last_answer(tmp_path: Path):
    tokens = load(tmp_path, QWEN)
    assert tokens.tokenize([*DIALOGUE, {"role": "user", "content": "Thanks"}]) == tokens.tokenize(DIALOGUE)


def test_a_template_that_changes_earlier_answers_learns_the_last_alone(tmp_path: Path):
    tokens = load(tmp_path, THINKING)
    with pytest.raises(ConversationError, match=r"set data\.train_on to last"):
        tokens.tokenize(DIALOGUE)
    assert texts(tokens, DIALOGUE, last_only=True) == ["<think>\n\n</think>\n\nRight<|im_end|>"]


@pytest.mark.parametrize("answer", ["<answer>4</answer>", "<tool_call>4</tool_call>", "<think", "4", ""])
def test_an_answer_that_begins_as_the_opened_thought_is_learned_whole(answer: str, tmp_path: Path):
    tokens = load(tmp_path, OPENED_THOUGHT)
    messages = [*DIALOGUE[:3], {"role": "assistant", "content": answer}]
    assert texts(tokens, messages) == ["Down  of P.<|im_end|>", f"{answer}<|im_end|>"]


def test_a_thought_that_the_generation_prompt_opens_is_no_answer(tmp_path: Path):
    shown = OPENED_THOUGHT.replace(".split('</think>')[-1]", "")
    messages = [DIALOGUE[0], {"role": "assistant", "content": "<think>\nDown</think>P"}]
    assert texts(load(tmp_path, shown), messages) == ["Down</think>P<|im_end|>"]


MORE_FAMILIES = {
    **FAMILIES,
    "mistral": (re.sub(r"{{ raise_exception.*?}}", "", MISTRAL), "<s>", "</s>", "</s>"),
    "opened thought": (OPENED_THOUGHT, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "thinking": (THINKING, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
}
"""Templates that take an assistant's message first."""


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_what_precedes_an_answer_without_a_question_is_not_learned(family: str, tmp_path: Path):
    """Neither its header nor a default system message."""
    template, bos, eos, end = MORE_FAMILIES[family]
    tokens = load(tmp_path, template, bos=bos, eos=eos)
    added = {"mistral": " ", "thinking": "<think>\n\n</think>\n\n"}.get(family, "")
    assert texts(tokens, DIALOGUE[1:2]) == [f"{added}Down  of P.{end}"]
    if family != "thinking":
        assert texts(tokens, DIALOGUE[1:])[0] == f"{added}Down  of P.{end}"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": "x"}], "no assistant turn"),
        ([{"role": "system", "content": "x"}, *DIALOGUE], "can't render"),
        ([DIALOGUE[0], {**DIALOGUE[1], "tool_calls": [{"function": {"arguments": "{"}}]}], "are no JSON"),
    ],
)
def test_what_can_not_be_learned_is_refused(messages: list[Any], problem: str, tmp_path: Path):
    with pytest.raises(ConversationError, match=problem):
        load(tmp_path, MISTRAL, bos="<s>", eos="</s>").tokenize(messages)
