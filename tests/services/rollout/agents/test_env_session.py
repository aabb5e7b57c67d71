import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from offbeat.services.chat.template import ChatTemplate
from offbeat.services.errors import EpisodeError
from offbeat.services.gateway.app import build
from offbeat.services.gateway.session import EpisodeSession, InvalidCallError
from offbeat.services.messages.types import Sampling
from offbeat.services.rollout.agents.episode import HttpEnvSession
from offbeat.services.rollout.agents.pool import AgentOutcome, outcome_of
from offbeat.services.rollout.config import AgentRunner, CustomEnv
from offbeat.services.rollout.envs.runners import EnvTraits, Opening, StepResult
from offbeat.services.rollout.episodes.episode import EpisodePlan
from tests.fakes_rollout import train_episode
from tests.services.gateway.templates import Scripted, session_of


def open_env(
    plain: ChatTemplate, step: Callable[[str], Awaitable[StepResult]]
) -> tuple[HttpEnvSession, EpisodeSession]:
    env = CustomEnv(env_type="frozen_lake", agent_runner=AgentRunner(path="a:play"))
    plan = EpisodePlan(train_episode(0), "Lake", 1, env, 512, Sampling(max_new_tokens=4), False, "w")
    http_env = HttpEnvSession(cast(Any, SimpleNamespace(step=step)), plan, EnvTraits("", {}), Opening("first"))
    session = session_of(Scripted(plain, []))
    session.env = http_env
    http_env.agent_task("http://gateway", plan, session)
    return http_env, session


async def test_a_step_that_waits_for_one_that_fails_is_refused(plain: ChatTemplate):
    errors = [EpisodeError("step_error", "first"), EpisodeError("step_error", "second")]

    async def step(_: str) -> StepResult:
        raise errors.pop(0)

    http_env, session = open_env(plain, step)
    first, second = await asyncio.gather(http_env.step("a"), http_env.step("b"), return_exceptions=True)
    assert first is http_env.error is session.failure
    assert isinstance(second, InvalidCallError)
    assert [error.detail for error in errors] == ["second"]


async def test_a_metric_that_is_not_finite_stays_out_of_the_reply_and_in_the_trajectory(plain: ChatTemplate):
    async def step(action: str) -> StepResult:
        return StepResult(action, 1.0, False, False, {"speed": math.inf, "height": 2.0})

    http_env, session = open_env(plain, step)
    transport = httpx.ASGITransport(app=build({session.key: session}))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        headers = {"Authorization": f"Bearer {session.key}"}
        response = await client.post("/env/step", json={"action": "on"}, headers=headers)
    assert (response.status_code, response.json()["metrics"]) == (200, {"height": 2.0})
    assert http_env.metrics({})["speed"] == math.inf


@pytest.mark.parametrize(
    "returned",
    [10**400, math.nan, "half of a pair: \ud83d", {"answer": "\ud83d"}, [1]],
    ids=lambda returned: repr(returned)[:9],
)
def test_a_result_that_is_neither_a_number_nor_a_text_is_refused(returned: Any):
    assert outcome_of(10**30) == AgentOutcome(reward=1e30)
    with pytest.raises(EpisodeError) as caught:
        outcome_of(returned)
    assert caught.value.reason == "agent_result"
