import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.play.parquet import read_parquet
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.server import Gateway
from offbeat.services.gateway.session import EpisodeSession, SessionLimits
from offbeat.services.messages.types import Completion, VersionSpan
from tests.json_server import json_server
from tests.services.gateway.templates import PLAIN, chat_template


class Endpoint:
    """An OpenAI-compatible server in a thread, whose model walks right and then down."""

    def __init__(self) -> None:
        self.template: ChatTemplate = chat_template(PLAIN)
        self.session = EpisodeSession(self.template, self._sample, SessionLimits(100_000, 100), model="walker")
        self.gateway = Gateway()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._open(), self.loop).result()

    async def _open(self) -> None:
        self.gateway.start()
        self._opened = self.gateway.open_session(self.session)
        self._opened.__enter__()

    async def _sample(self, _: tuple[int, ...], __: int) -> Completion:
        text = "Down" if self.session.tree.nodes else "Right"
        ids = (*self.template.encode(text), self.template.end_id)
        return Completion("", ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids), 0),))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.gateway.close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    try:
        yield server
    finally:
        server.close()


def play(*arguments: object, key: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["play", "frozen_lake", "--seed", "1", *map(str, arguments)], env={"OPENAI_API_KEY": key}
    )
    return result.exit_code, result.output


def test_model_behind_endpoint_runs_an_episode(endpoint: Endpoint):
    code, output = play("--agent", "openai", f"{endpoint.gateway.origin}/v1", key=endpoint.session.key)
    assert code == 0, output
    assert "'Right'" in output
    assert "'Down'" in output
    assert "stop" in output
    (segment,) = endpoint.session.close().segments
    conversation = "".join(endpoint.template.token_text(int(token)) for token in segment.tokens)
    assert conversation.startswith(
        "<|im_start|>system\nWalk P to G . Avoid O .<|im_end|>\n<|im_start|>user\nP _ _ _\nO _"
    )


def test_endpoint_errors_are_printed(endpoint: Endpoint):
    code, output = play("--agent", "openai", f"{endpoint.gateway.origin}/v1", key="wrong")
    assert code == 2
    assert "401" in output
    assert "OPENAI_API_KEY" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--agent", "openai"), "needs the endpoint's base URL"),
        (("--agent", "random", "http://localhost:1/v1"), "belong to --agent openai"),
        (("--agent", "openai", "http://127.0.0.1:1/v1"), "does not answer"),
    ],
)
def test_invalid_endpoint_is_rejected_in_one_line(arguments: tuple[str, ...], message: str):
    code, output = play(*arguments)
    assert (code, message in output) == (2, True), output


class Walker:
    """An endpoint that walks right and then down, by the number of answers in a request."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.errors: list[int] = []
        self.stop_reason: str | int | None = None
        self.finish_reason = "stop"
        self.url = ""

    def answer(self, request: Any) -> tuple[int, Any]:
        if request is None:
            return 200, {"data": [{"id": "walker"}]}
        if self.errors:
            return self.errors.pop(), {"error": "busy"}
        self.requests.append(request)
        answers = sum(message["role"] == "assistant" for message in request["messages"])
        message = {"content": ("Right", "Down")[answers % 2]}
        ended = {"stop_reason": self.stop_reason, "finish_reason": self.finish_reason}
        return 200, {"choices": [{"message": message, **ended}]}


@pytest.fixture
def walker() -> Iterator[Walker]:
    walker = Walker()
    with json_server(walker.answer) as origin:
        walker.url = f"{origin}/v1"
        yield walker


def rollout(out: Path, *arguments: object) -> tuple[int, str]:
    command = ["rollout", "quickstart", "--episodes", "6", "--group-size", "2", "--out", str(out), *map(str, arguments)]
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.output


def test_an_endpoint_plays_a_runs_episodes(walker: Walker, tmp_path: Path):
    """Limits in tokens do not apply to it, whose tokens are unknown: they go with the requests."""
    walker.errors = [429, 503]
    sampling = ("val_env_manager.generating_args.max_new_tokens=3", "val_env_manager.generating_args.temperature=0.5")
    code, output = rollout(tmp_path / "out.jsonl", *sampling, "--agent", "openai", walker.url)
    assert code == 0, output
    assert f"collecting 6 episodes with {walker.url}" in output
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert said == (["Right", "Down"] * 20)[: len(said)]
    first = walker.requests[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("walker", 0.5, 3)
    assert first["messages"][0]["role"] == "system"


@pytest.mark.parametrize(("stop_reason", "end"), [("ght", "ght"), (2, ""), (None, "")])
def test_the_stop_string_that_ended_an_answer_is_part_of_it(
    stop_reason: str | int | None, end: str, walker: Walker, tmp_path: Path
):
    walker.stop_reason = stop_reason
    stops = 'val_env_manager.generating_args.stop_strings=["ght"]'
    code, output = rollout(tmp_path / "out.jsonl", stops, "--agent", "openai", walker.url)
    assert code == 0, output
    assert walker.requests[0]["stop"] == ["ght"]
    messages = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["messages"]
    assert next(each["content"] for each in messages if each["role"] == "assistant") == f"Right{end}"


def test_prompts_of_rows_are_not_counted_in_bytes(walker: Walker, tmp_path: Path):
    """The run's limit of 24 is of its tokenizer's words."""
    data = tmp_path / "rows.jsonl"
    row = {"prompt": "a prompt of more than twenty-four bytes", "ground_truth": "Right"}
    data.write_text("".join(f"{json.dumps({**row, 'tag': tag})}\n" for tag in ("addition", "mixed")))
    walker.finish_reason = "length"
    names = (f"data.dataset_name={data}", f"data.val_dataset_name={data}")
    command = ["rollout", "rlvr", *names, "--episodes", "2", "--out", str(tmp_path / "out.parquet")]
    result = CliRunner().invoke(app, [*command, "--agent", "openai", walker.url])
    assert result.exit_code == 0, result.output
    episodes = read_parquet(tmp_path / "out.parquet")
    assert [episode.messages[-1]["content"] for episode in episodes] == ["Right"] * 2
    assert [episode.metrics["truncated_ratio"] for episode in episodes] == [1.0] * 2


def test_episodes_whose_answers_fail_are_counted(walker: Walker, tmp_path: Path):
    walker.errors = [400] * 2
    code, output = rollout(tmp_path / "out.parquet", "--agent", "openai", walker.url, "--model", "other")
    assert code == 0, output
    assert "2 episodes could not be played" in output
    assert "/chat/completions answers 400" in output
    assert "mean of 4 episodes" in output
    assert {request["model"] for request in walker.requests} == {"other"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--agent", "openai"), "needs the endpoint's base URL: offbeat rollout CONFIG"),
        (("--model", "gpt"), "belong to --agent openai"),
        (("--agent", "openai", "http://127.0.0.1:1/v1"), "does not answer"),
    ],
)
def test_an_endpoint_of_rollouts_is_checked(arguments: tuple[str, ...], message: str, tmp_path: Path):
    code, output = rollout(tmp_path / "out.jsonl", *arguments)
    assert (code, message in output) == (2, True), output
