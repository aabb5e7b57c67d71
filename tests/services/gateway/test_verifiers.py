"""verifiers' own harness, tools and rewards, with the policy behind its calls; skipped where it is not installed."""

import asyncio
from typing import Any

import pytest

from offbeat.deploy.agents.verifiers_env import play
from offbeat.envs import registry
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.server import Gateway
from offbeat.services.rollout.agents.task import AgentTask
from tests.paths import ROOT
from tests.services.gateway.templates import Scripted, session_of

pytest.importorskip("verifiers.v1")

TASKSETS = ROOT / "tests/envs/adapters"


async def played(policy: Scripted, env_config: dict[str, Any]) -> dict[str, Any]:
    """One task, chosen by the env and played by verifiers."""
    env = registry.make("verifiers", {"played_by": "agent", **env_config})
    observation, _ = env.reset(seed=1)
    session, gateway = session_of(policy), Gateway()
    gateway.start()
    try:
        with gateway.open_session(session):
            origin = gateway.origin
            addresses = (f"{origin}/v1", session.key, origin, f"{origin}/env")
            task = AgentTask(*addresses, "policy", "Tag", 1, env.system_prompt, observation, 4)
            return await asyncio.to_thread(play, task)
    finally:
        await gateway.close()


@pytest.fixture(autouse=True)
def _own_tasksets_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))


async def test_verifiers_runs_and_scores_a_tool_task_with_two_requests(hermes: ChatTemplate):
    call = '<tool_call>\n{"name": "price_tools_price", "arguments": {"thing": "tea"}}\n</tool_call>'
    policy = Scripted(hermes, [call, "3"])
    result = await played(policy, {"id": "vf_shop"})
    assert (result["reward"], result["metrics"]["success"]) == (1.0, 1.0)
    assert len(policy.sent) == 2
    shown = hermes.text_of(policy.sent[1])
    assert "What a thing costs." in shown
    assert "<tool_response>\n3\n</tool_response>" in shown


async def test_a_wrong_answer_gets_nothing_and_metrics_travel(hermes: ChatTemplate):
    result = await played(Scripted(hermes, ["a hundred and one"]), {"id": "vf_sums", "success_reward": 1.5})
    assert result == {"reward": 0.0, "metrics": {"num_words": 4.0, "success": 0.0}}
