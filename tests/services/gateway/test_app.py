"""Routes without a server, with a policy that follows a script."""

import json
import math
import re
from typing import Any

import httpx
import pytest

from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.app import build
from offbeat.services.gateway.session import EpisodeSession
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


async def post(session: EpisodeSession, path: str, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(app=build({session.key: session}), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        headers = {"Authorization": f"Bearer {session.key}"}
        return await client.post(path, content=json.dumps(body), headers=headers)


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
    ],
)
async def test_parameters_that_are_not_followed_are_counted(
    hermes: ChatTemplate, parameters: dict[str, Any], num_ignored: int
):
    session = session_of(Scripted(hermes, ["yes"]))
    response = await post(session, "/v1/chat/completions", {"messages": HELLO, **parameters})
    assert (response.status_code, session.close().metrics["ignored_parameters"]) == (200, num_ignored)


@pytest.mark.parametrize(
    ("changes", "problem"), [({"n": 0}, "n is 0"), ({"max_tokens": 0}, "is 0"), ({"prompt": [True, 5]}, "token ids")]
)
async def test_a_completion_without_anything_to_sample_is_refused(
    hermes: ChatTemplate, changes: dict[str, Any], problem: str
):
    response = await post(session_of(Scripted(hermes, [])), "/v1/completions", {"prompt": [5, 6], **changes})
    assert (response.status_code, problem in response.json()["error"]["message"]) == (400, True)
