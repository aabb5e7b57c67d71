"""Agents of a framework from PyPI (smolagents), which knows nothing but a base URL and a key."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.server import Gateway
from offbeat.services.gateway.session import EpisodeSession
from tests.services.gateway.templates import Scripted, session_of

pytestmark = pytest.mark.slow

smolagents = pytest.importorskip("smolagents")


@contextlib.asynccontextmanager
async def model_of(session: EpisodeSession) -> AsyncIterator[object]:
    gateway = Gateway()
    gateway.start()
    try:
        with gateway.open_session(session):
            yield smolagents.OpenAIModel(
                model_id="policy",
                api_base=f"{gateway.origin}/v1",
                api_key=session.key,
                client_kwargs={"max_retries": 0},
            )
    finally:
        await gateway.close()


class Walk(smolagents.Tool):
    name = "walk"
    description = "Walk a step."
    inputs = {"direction": {"type": "string", "description": "where to"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, direction: str) -> str:
        return f"walked {direction}"


def cut(policy: Scripted, number: int) -> list[int]:
    """The tokens of an answer up to the framework's stop word, `</code>`, which here ends it."""
    return list(policy.made[number].token_ids[:-1])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_an_agent_that_writes_code_is_captured_completely(plain: ChatTemplate):
    policy = Scripted(
        plain,
        [
            "Thought: I walk.\n<code>\nprint(walk('Right'))\n</code>",
            "Thought: there.\n<code>\nfinal_answer(7)\n</code>",
        ],
    )
    session = session_of(policy)
    async with model_of(session) as model:
        agent = smolagents.CodeAgent(tools=[Walk()], model=model, verbosity_level=0)
        assert await asyncio.to_thread(agent.run, "Walk right.") == 7
    captured = session.close()
    (segment,) = captured.segments
    assert segment.tokens.tolist() == [*policy.sent[1], *cut(policy, 1)], "it puts words behind each answer"
    assert segment.tokens[segment.loss_mask].tolist() == [*cut(policy, 0), *cut(policy, 1)]
    assert captured.metrics["unverified_messages"] == 0


async def test_a_tool_agents_rewritten_history_trains_each_answer_once(hermes: ChatTemplate):
    policy = Scripted(hermes, [call("walk", '{"direction": "Right"}'), call("final_answer", '{"answer": "there"}')])
    session = session_of(policy)
    async with model_of(session) as model:
        agent = smolagents.ToolCallingAgent(tools=[Walk()], model=model, verbosity_level=0)
        assert await asyncio.to_thread(agent.run, "Walk right.") == "there"
    captured = session.close()
    assert [segment.tokens[segment.loss_mask].tolist() for segment in captured.segments] == [
        list(made.token_ids) for made in policy.made
    ]
    assert captured.metrics["unverified_messages"] == 1, "it writes calls into its history as words of its own"
    assert captured.metrics["ignored_parameters"] == 2, "tool_choice: required, twice"
