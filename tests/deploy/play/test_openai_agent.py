import asyncio
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.server import Gateway
from offbeat.services.gateway.session import EpisodeSession, SessionLimits
from offbeat.services.messages.types import Completion, VersionSpan
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
