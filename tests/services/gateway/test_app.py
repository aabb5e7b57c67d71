"""Routes without a server, with a policy that follows a script."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.app import build
from offbeat.services.gateway.session import EpisodeSession
from offbeat.services.messages.types import Completion
from tests.services.gateway.templates import Scripted, session_of

HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object"}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/messages": {
        "messages": HELLO,
        "max_tokens": 1000,
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
    },
    "/v1/responses": {"input": "hello", "tools": [{"type": "function", **FUNCTION}]},
}


async def post(
    session: EpisodeSession, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    transport = httpx.ASGITransport(app=build({session.key: session}), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        headers = headers or {"Authorization": f"Bearer {session.key}"}
        return await client.post(path, content=json.dumps(body), headers=headers)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "bearer KEY"}, 200),
        ({"Authorization": "KEY"}, 200),
        ({"x-api-key": "KEY"}, 200),
        ({"Authorization": "Bearer token-of-the-machine", "x-api-key": "KEY"}, 200),
        ({"Authorization": "Bearer KEY", "x-api-key": "key-of-the-machine"}, 200),
        ({"Authorization": "Bearer other", "x-api-key": "another"}, 401),
        ({"Authorization": "Basic KEY"}, 401),
        ({"Accept": "*/*"}, 401),
    ],
)
async def test_a_key_is_found_in_either_header(hermes: ChatTemplate, headers: dict[str, str], status: int):
    """Anthropic's clients send both where `ANTHROPIC_AUTH_TOKEN` is set."""
    session = session_of(Scripted(hermes, ["yes"]))
    sent = {name: value.replace("KEY", session.key) for name, value in headers.items()}
    assert (await post(session, "/v1/messages", REQUESTS["/v1/messages"], sent)).status_code == status


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("value", ["[" * 3000, '"\\ud83d"', "1e999"], ids=["nested", "surrogate", "infinite"])
async def test_a_call_that_is_no_valid_json_is_delivered_as_text(hermes: ChatTemplate, path: str, value: str):
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>'
    session = session_of(Scripted(hermes, [call]), max_new_tokens=9000)
    response = await post(session, path, REQUESTS[path] | {"max_tokens": 9000})
    assert (response.status_code, json.dumps(call) in response.text) == (200, True)
    assert [node.delivered for node in session.tree.nodes] == [True]


async def test_an_answer_that_is_not_sent_is_not_delivered(hermes: ChatTemplate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.services.gateway.openai_chat.write_chat", lambda *_: {"content": "\ud83d"})
    session = session_of(Scripted(hermes, ["yes"]))
    response = await post(session, "/v1/chat/completions", {"messages": HELLO})
    assert (response.status_code, [node.delivered for node in session.tree.nodes]) == (500, [False])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"messages": [{"role": "user", "content": "cut \ud83d"}]}, "half of a surrogate pair after .*cut "),
        ({"metadata": {"a": math.nan}}, "the body is no JSON"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty can't be followed"),
        ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "a function's name is None"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "parameters": "x"}}]}, "parameters is 'x'"),
    ],
)
async def test_a_body_that_can_not_be_answered_is_refused(hermes: ChatTemplate, changes: dict[str, Any], problem: str):
    session = session_of(Scripted(hermes, []))
    response = await post(session, "/v1/chat/completions", {"messages": HELLO, **changes})
    assert (response.status_code, session.tree.nodes) == (400, [])
    assert re.search(problem, response.json()["error"]["message"])


CALLED = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
FIRST = {"role": "assistant", "content": "1,"}


@pytest.mark.parametrize(
    ("path", "changes", "problem"),
    [
        ("/v1/chat/completions", {"functions": [FUNCTION]}, "functions is not supported: offer them as tools"),
        ("/v1/chat/completions", {"messages": [*HELLO, CALLED]}, r"messages\[1\].function_call is not supported"),
        ("/v1/chat/completions", {"documents": [{"text": "a"}]}, "documents is not supported"),
        ("/v1/chat/completions", {"chat_template": "{{ messages }}"}, "chat_template is not supported"),
        ("/v1/chat/completions", {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens is not supported"),
        ("/v1/chat/completions", {"add_generation_prompt": False}, "add_generation_prompt: false is not supported"),
        ("/v1/chat/completions", {"continue_final_message": True}, "the last message is not the assistant's"),
        ("/v1/responses", {"conversation": "conv_1"}, "conversation is not supported: .*previous_response_id"),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
        ("/v1/messages", {"mcp_servers": [{"name": "a"}]}, "mcp_servers is not supported"),
    ],
)
async def test_what_would_change_the_conversation_is_refused(
    hermes: ChatTemplate, path: str, changes: dict[str, Any], problem: str
):
    session = session_of(Scripted(hermes, []))
    response = await post(session, path, {**REQUESTS[path], **changes})
    assert (response.status_code, session.tree.nodes) == (400, [])
    assert re.search(problem, response.json()["error"]["message"])


UNSET = {"functions": None, "function_call": "auto", "documents": [], "chat_template": None, "mcp_servers": []}


async def test_unset_fields_of_a_conversation_are_read(hermes: ChatTemplate):
    """Clients send back messages with all of their fields."""
    session = session_of(Scripted(hermes, ["yes"]))
    messages = [*HELLO, {**CALLED, "content": "no", "function_call": None}, *HELLO]
    response = await post(session, "/v1/chat/completions", {"messages": messages, **UNSET})
    assert (response.status_code, session.close().metrics["ignored_parameters"]) == (200, 0)


@pytest.mark.parametrize(
    "how",
    [
        ([FIRST], {"continue_final_message": True, "add_generation_prompt": False}),
        ([{**FIRST, "prefix": True}], {}),
    ],
)
async def test_a_final_assistant_message_of_a_chat_is_continued(
    hermes: ChatTemplate, how: tuple[list[dict[str, Any]], dict[str, Any]]
):
    """By vLLM's names, and by Mistral's and DeepSeek's."""
    last, parameters = how
    session = session_of(policy := Scripted(hermes, [" 2"]))
    response = await post(session, "/v1/chat/completions", {"messages": [*HELLO, *last], **parameters})
    assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, " 2")
    assert hermes.text_of(policy.sent[0]).endswith("assistant\n1,")
    assert session.close().metrics["ignored_parameters"] == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_tool_without_a_name_is_refused_by_each_api(hermes: ChatTemplate, path: str):
    body = REQUESTS[path]
    tools = [{key: value for key, value in tool.items() if key != "name"} for tool in body["tools"]]
    response = await post(session_of(Scripted(hermes, [])), path, {**body, "tools": tools})
    assert (response.status_code, "a function's name is None" in response.text) == (400, True)


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_tool_that_is_no_function_is_refused_where_it_can_be_called(hermes: ChatTemplate, path: str):
    body = REQUESTS[path]
    tools = [*body["tools"], {"type": "web_search_20250305", "name": "web_search"}]
    none = {"type": "none"} if path == "/v1/messages" else "none"
    policy = Scripted(hermes, ["yes"])
    refused = await post(session_of(policy), path, {**body, "tools": tools})
    answered = await post(session_of(policy), path, {**body, "tools": tools, "tool_choice": none})
    assert (refused.status_code, "can be offered, not" in refused.text, answered.status_code) == (400, True, 200)


@pytest.mark.parametrize(
    ("parameters", "num_ignored"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 5, "temperature": 0}, 3),
        ({"repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": []}, 0),
        ({"thinking": {"type": "disabled"}, "best_of": 1}, 0),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}, "best_of": 2}, 2),
        ({"skip_special_tokens": True, "truncation": "disabled", "include_stop_str_in_output": False}, 0),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True, "allowed_token_ids": [5]}, 3),
        ({"truncation": "auto", "background": True, "max_tool_calls": 3}, 3),
        (
            {
                "output_config": {"effort": "low"},
                "output_format": {"type": "json_schema"},
                "context_management": {"a": 1},
            },
            3,
        ),
    ],
)
async def test_parameters_that_are_not_followed_are_counted(
    hermes: ChatTemplate, parameters: dict[str, Any], num_ignored: int
):
    session = session_of(Scripted(hermes, ["yes"]))
    response = await post(session, "/v1/chat/completions", {"messages": HELLO, **parameters})
    assert (response.status_code, session.close().metrics["ignored_parameters"]) == (200, num_ignored)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "is 0"),
        ({"prompt": [True, 5]}, "token ids"),
        ({"prompt": [5, 10**6]}, "token 1000000 is not in the policy's vocabulary of 258"),
    ],
)
async def test_a_completion_without_anything_to_sample_is_refused(
    hermes: ChatTemplate, changes: dict[str, Any], problem: str
):
    session = session_of(Scripted(hermes, []))
    response = await post(session, "/v1/completions", {"prompt": [5, 6], **changes})
    assert (response.status_code, problem in response.json()["error"]["message"]) == (400, True)
    assert session.failure is None


async def test_a_sampled_token_beyond_the_tokenizers_is_taken_back(hermes: ChatTemplate):
    """A model may have more rows than its tokenizer has tokens."""

    class Padded(Scripted):
        async def __call__(self, prompt: tuple[int, ...], max_new_tokens: int) -> Completion:
            completion = await super().__call__(prompt, max_new_tokens)
            return replace(completion, token_ids=(300, *completion.token_ids[1:]))

    session = session_of(Padded(hermes, ["yes", "no"]))
    for prompt, status in (([5, 300], 400), ([5, 6], 200), ([5, 6, 300], 200), ([5, 6, 301], 400)):
        assert (await post(session, "/v1/completions", {"prompt": prompt})).status_code == status
