"""The search tool with a retrieval server, over real sockets."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from offbeat.envs import registry
from offbeat.envs.tools import retriever
from offbeat.envs.tools.tool_calls import SearchTool
from tests.json_server import json_server

PASSAGES = [
    {"document": {"contents": '"Paris"\nParis is the capital of France.'}, "score": 0.9},
    {"document": {"title": "Rome", "text": "Rome is the capital of Italy."}, "score": 0.5},
    {"id": "3", "contents": "Whales are mammals."},
]


class Server:
    """A retrieval server that keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.status, self.body, self.delay_s = 200, json.dumps({"result": [PASSAGES]}).encode(), 0.0
        self.url = ""

    def answer(self, request: Any) -> tuple[int, bytes]:
        self.requests.append(request)
        time.sleep(self.delay_s)
        return self.status, self.body


@pytest.fixture
def server() -> Iterator[Server]:
    retriever.check_server.cache_clear()
    server = Server()
    with json_server(server.answer) as origin:
        server.url = f"{origin}/retrieve"
        yield server


def tool(server: Server, **settings: Any) -> SearchTool:
    return SearchTool.model_validate_json(json.dumps({"tool_id": "search", "url": server.url, **settings}))


def test_an_env_searches_a_server(server: Server) -> None:
    tools = [{"tool_id": "search", "url": server.url, "top_k": 2}]
    env: Any = registry.make("tools", {"env_type": "frozen_lake", "tools": tools, "tool_success_reward": 0.5})
    another = registry.make("tools", {"env_type": "frozen_lake", "tools": tools})
    assert len(server.requests) == 1, "one check per process"
    env.reset(seed=1)
    observation, reward, *_, info = env.step("<search> capital of Italy </search>")
    assert server.requests[1] == {"queries": ["capital of Italy"], "topk": 2, "return_scores": True}
    assert observation == '[1] "Paris"\nParis is the capital of France.\n[2] Rome\nRome is the capital of Italy.'
    assert (reward, info["tool_use_counter"], info["tool_success_counter"]) == (0.5, 1, 1)
    assert env.step("<search> </search>")[0] == "the search is empty"
    assert len(server.requests) == 2
    env.close()
    another.close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, b"no index", "the search failed: HTTP 503 Service Unavailable: no index"),
        (200, b"<html>", 'the search failed: a reply that is not {"result": [[{"document": {"contents": ...}}, ...]]}'),
        (200, b'{"result": [[{"document": {"id": 3}}]]}', "the search failed: a reply that is not"),
        (200, b'{"result": [[["Paris", 0.9]]]}', "the search failed: a reply that is not"),
        (200, b'{"result": []}', "the search failed: a reply that is not"),
        (200, b'{"result": [[]]}', "nothing was found"),
        (200, b'"' + b"x" * (4 << 20) + b'"', "the search failed: a reply of more than 4 MiB"),
    ],
)
def test_failures_are_shown_to_the_policy(server: Server, status: int, body: bytes, message: str) -> None:
    searching = tool(server).open()
    server.status, server.body = status, body
    result = searching.use("Paris", 60.0)
    assert result.text.startswith(message)
    assert not result.ok


def test_a_slow_server_and_one_that_is_gone(server: Server) -> None:
    searching = tool(server, timeout_s=60.0)
    server.delay_s = 2.0
    assert searching.use("Paris", 0.2).text == "the search failed: timed out"
    with json_server(server.answer) as gone:
        pass
    assert "refused" in searching.model_copy(update={"url": gone}).use("Paris", 5.0).text


def test_an_env_is_not_made_without_its_server(server: Server) -> None:
    server.status = 404
    with pytest.raises(ValueError, match=rf"^url: {server.url} answers no search: HTTP 404 Not Found"):
        tool(server).open()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set either corpus or url"),
        ({"corpus": "c.txt", "url": "http://a/retrieve"}, "set either corpus or url"),
        ({"url": "file:///etc/passwd"}, "String should match pattern"),
    ],
)
def test_where_to_search_is_given_once(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchTool.model_validate_json(json.dumps({"tool_id": "search", **settings}))
