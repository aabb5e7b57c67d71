import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from offbeat.envs.frozen_lake import WORDS
from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.errors import GenerationError
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import GenerateRequest, StopReason, Trajectory
from offbeat.services.rollout.config import AgentRunner, CustomEnv, OnAgentError
from offbeat.services.rollout.worker import EnvWorker
from offbeat.services.telemetry import merge_all
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.fakes_rollout import (
    HERE,
    FakeBuffer,
    FakeGeneration,
    FakeMetrics,
    train_episode,
    worker_settings,
)
from tests.played_agents import SCRIPT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

AGENTS = "tests.played_agents:"


def played_by(agent: str | tuple[str, ...], env: str = HERE + "CountingEnv", **changes: Any) -> CustomEnv:
    named = {"path": AGENTS + agent} if isinstance(agent, str) else {"command": agent}
    rules = {"max_steps": 5, "max_tokens_per_step": 4, "execution": "inline", **changes.pop("rules", {})}
    return CustomEnv(env_type=env, agent_runner=AgentRunner(**named, **changes), **rules)


class Mesh:
    def __init__(self, buffer: FakeBuffer, generation: FakeGeneration) -> None:
        self.buffer, self.generation = buffer, generation
        self.metrics = FakeMetrics()
        self.worker: Any = None
        self.waits: set[str] = set()
        """All that episodes were seen to wait for."""

    async def show(self, worker_id: str, report: Mapping[str, Any]) -> None:
        del worker_id
        self.waits.update(wait for waits in report["groups"].values() for wait in waits)

    async def outcome(self) -> Trajectory | str:
        """Of the one episode: its trajectory, or why there is none."""
        await wait_until(lambda: bool(self.buffer.submitted or self.buffer.failed))
        return self.buffer.failed[0][1] if self.buffer.failed else next(iter(self.buffer.submitted.values()))


@pytest.fixture
def mesh(policy_folder: Path, chat: ChatFormat, tokenizer: Tokenizer):
    ids = [tokenizer.token_to_id(word) for word in ("Left", "Down", "Right", "Up")]
    end = tokenizer.token_to_id("<|im_end|>")

    def walk(request: GenerateRequest) -> tuple[int, ...]:
        return (ids[sum(request.prompt) % 4], end)

    @contextlib.asynccontextmanager
    async def make(env: CustomEnv, episodes: int = 1, answer: Any = walk) -> AsyncIterator[Mesh]:
        settings = worker_settings(policy_folder, custom_envs={"Tag": env})
        buffer, generation = FakeBuffer([train_episode(0, i) for i in range(episodes)]), FakeGeneration(answer)
        made = Mesh(buffer, generation)
        worker = EnvWorker(
            settings, "w", buffer=buffer, generation=generation, metrics=made.metrics, chat=chat, board=made
        )
        made.worker = worker
        running = asyncio.create_task(worker.run())
        try:
            yield made
        finally:
            worker.stop()
            await running

    return make


async def test_a_step_by_step_agent_gives_the_policys_own_trajectory(mesh):
    async with mesh(played_by("plays", "frozen_lake")) as m:
        by_agent = await m.outcome()
    async with mesh(CustomEnv(env_type="frozen_lake", max_steps=5, max_tokens_per_step=4, execution="inline")) as m:
        alone = await m.outcome()
    assert by_agent.turns == alone.turns
    assert by_agent.stop_reason is alone.stop_reason
    (mine,), (theirs,) = by_agent.segments, alone.segments
    for part in ("tokens", "loss_mask", "logprobs"):
        assert getattr(mine, part).tolist() == getattr(theirs, part).tolist()
    assert mine.token_versions().tolist() == theirs.token_versions().tolist()
    shared = set(alone.metrics) & set(by_agent.metrics)
    assert {name: by_agent.metrics[name] for name in shared} == alone.metrics


async def test_the_documented_agent_ends_with_its_context_as_the_policy_alone(mesh):
    rules: dict[str, Any] = {"max_steps": 1000, "max_tokens_per_step": 4, "execution": "inline"}
    env = CustomEnv(env_type=HERE + "CountingEnv", env_config={"length": 1000}, **rules)
    walker = AgentRunner(path="offbeat.deploy.agents.walker:play")
    async with mesh(env.model_copy(update={"agent_runner": walker})) as m:
        by_agent = await m.outcome()
    async with mesh(env) as m:
        alone = await m.outcome()
    assert (by_agent.stop_reason, by_agent.turns) == (StopReason.MAX_LENGTH, alone.turns)


async def test_a_commands_processes_end_with_its_episode(mesh, tmp_path: Path):
    script = tmp_path / "agent.py"
    script.write_text(SCRIPT)
    before = children_of(os.getpid())
    async with mesh(played_by((sys.executable, str(script)))) as m:
        played = await m.outcome()
        assert (played.reward, len(played.turns), played.stop_reason) == (1.5, 3, StopReason.TERMINATED)
        assert played.metrics["scripted"] == 1
        assert not children_of(os.getpid()) - before


async def test_an_agents_images_are_sampled_and_submitted(tmp_path: Path):
    """By a whole worker; the policy is of its own, as those of the other tests read no images."""
    write_tiny_policy(tmp_path, TinyPolicyConfig(vision=TinyVisionConfig()), (*WORDS, "w1", "w2", "w3"))
    chat = load_chat_format(tmp_path)
    answer = (*chat.encode("Left"), chat.end_id)
    buffer, generation = FakeBuffer([train_episode(0, i) for i in range(2)]), FakeGeneration(lambda _: answer)
    settings = worker_settings(tmp_path, custom_envs={"Tag": played_by("shows_images", "frozen_lake")})
    worker = EnvWorker(settings, "w", buffer=buffer, generation=generation, metrics=FakeMetrics(), chat=chat)
    running = asyncio.create_task(worker.run())
    try:
        await wait_until(lambda: len(buffer.submitted) == 2 or bool(buffer.failed))
    finally:
        worker.stop()
        await running
    assert buffer.failed == []
    sent = [request for call in generation.calls for request in call if request.images]
    for played in buffer.submitted.values():
        first, branch = (segment.images for segment in decode_trajectory(encode_trajectory(played)).segments)
        assert ([image.count for image in first], [image.count for image in branch]) == ([2, 2], [2])
        assert branch[0].png not in [image.png for image in first]
        assert {first[:1], first, branch} == {request.images for request in sent}


async def test_an_answer_is_scored_by_the_env(mesh):
    async with mesh(played_by("answers")) as m:
        played = await m.outcome()
    assert (played.reward, len(played.turns)) == (0.5, 1)
    assert played.metrics["agent_calls"] == 1


async def test_a_number_is_the_reward_instead_of_the_envs(mesh):
    async with mesh(played_by("rates_itself")) as m:
        played = await m.outcome()
    assert played.reward == 7.5


@pytest.mark.parametrize(
    ("agent", "reason"), [("silent", "agent_silent"), ("raises", "agent_error"), ("nonsense", "agent_result")]
)
async def test_an_agents_failure_is_recorded_as_data(mesh, agent: str, reason: str):
    async with mesh(played_by(agent)) as m:
        assert await m.outcome() == reason


@pytest.mark.parametrize(("agent", "reason"), [("raises", "agent_error"), ("nonsense", "agent_result")])
async def test_an_agents_error_ends_the_episode_with_the_rules_reward(mesh, agent: str, reason: str):
    async with mesh(played_by(agent, rules={"on_agent_error": {"reward": -1.0}})) as m:
        played = await m.outcome()
    assert (played.stop_reason, played.reward, len(played.turns)) == (StopReason.ERROR, -1.0, 1)
    assert played.segments[0].loss_mask.any()
    assert played.error.startswith(f"{reason}: ")
    assert played.metrics["ended_by_error"] == 1.0


async def test_an_error_before_the_first_answer_of_the_policy_is_tried_again(mesh):
    async with mesh(played_by("raises_at_once", rules={"on_agent_error": {"reward": -1.0}})) as m:
        assert await m.outcome() == "agent_error"


async def test_failed_sampling_is_no_error_of_the_agent(mesh):
    async with mesh(played_by("plays", rules={"on_agent_error": {"reward": -1.0}})) as m:
        m.generation.errors = [GenerationError("too long")]
        assert await m.outcome() == "generation_refused"


async def test_an_env_error_under_an_agent_has_the_reward_of_its_step(mesh):
    rules = {"env_config": {"how": "raise"}, "on_env_error": {"reward": -2.0}, "on_agent_error": {"reward": -9.0}}
    async with mesh(played_by("plays", HERE + "BadEnv", rules=rules)) as m:
        played = await m.outcome()
    assert (played.stop_reason, [turn.reward for turn in played.turns]) == (StopReason.ERROR, [0.5, -2.0])
    assert played.metrics["success"] == 0.0


def test_errors_of_an_agent_need_an_agent():
    with pytest.raises(ValidationError, match="on_agent_error needs an agent_runner"):
        CustomEnv(env_type="frozen_lake", on_agent_error=OnAgentError(reward=0.0))


async def test_an_agent_that_hangs_is_killed_with_its_children(mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    marker = tmp_path / "pids"
    monkeypatch.setenv("OFFBEAT_TEST_MARKER", str(marker))
    async with mesh(played_by("hangs_with_child", timeout_s=0.01)) as m:
        with m.worker._player._clock.stopped():
            await wait_until(lambda: marker.exists() and "agent" in m.waits)
        assert await m.outcome() == "agent_timeout"
        pids = json.loads(marker.read_text())
        await wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(("grace_s", "ends_with"), [(30.0, "released"), (5.0, "cancelled")])
async def test_a_stopped_worker_leaves_agents_their_grace(
    mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float, ends_with: str
):
    """Its episodes are returned before."""
    monkeypatch.setattr("offbeat.services.rollout.worker.SHUTDOWN_TIMEOUT_S", 0.2)
    marker, before = tmp_path / "marker", children_of(os.getpid())
    monkeypatch.setenv("OFFBEAT_TEST_MARKER", str(marker))
    async with mesh(played_by("releases_containers", cancel_grace_s=grace_s)) as m:
        await wait_until(marker.exists)
        m.worker.stop()
        await wait_until(lambda: m.buffer.released == 1)
        if ends_with == "released":
            (tmp_path / "marker.gate").touch()
    assert marker.read_text() == ends_with
    assert not children_of(os.getpid()) - before


async def test_an_episode_cancelled_within_an_env_step_leaves_no_process(mesh, tmp_path: Path):
    before, gate = children_of(os.getpid()), tmp_path / "gate"
    rules = {"env_config": {"gate": str(gate)}, "execution": "process"}
    async with mesh(played_by("plays", HERE + "WaitingEnv", rules=rules)) as m:
        await wait_until((tmp_path / "gate.waits").exists)
        assert len(children_of(os.getpid()) - before) == 2  # agent and env
        m.buffer.to_cancel = [train_episode(0)]
        await wait_until(lambda: not children_of(os.getpid()) - before)
        await wait_until(lambda: "cancelled" in merge_all(record.values for record in m.metrics.records))
    assert m.buffer.failed == []


async def test_an_agent_is_ended_when_the_policy_can_t_be_sampled(mesh):
    async with mesh(played_by("plays")) as m:
        m.generation.errors = [GenerationError("too long")]
        assert await m.outcome() == "generation_refused"


async def test_an_env_failure_under_an_agent_is_the_episodes_reason(mesh):
    env = played_by("plays", HERE + "BadEnv", rules={"env_config": {"how": "raise"}})
    async with mesh(env) as m:
        assert await m.outcome() == "step_error"


async def test_concurrent_agents_are_limited_and_processes_reused(mesh):
    seen: set[int] = set()
    before = children_of(os.getpid())
    async with mesh(played_by("plays", num_agents=2), episodes=6) as m:

        def done() -> bool:
            seen.update(children_of(os.getpid()) - before)
            return len(m.buffer.submitted) == 6

        await wait_until(done)
    assert len(seen) == 2
    assert not children_of(os.getpid()) - before


async def test_an_episodes_time_begins_with_its_agent(mesh, monkeypatch: pytest.MonkeyPatch):
    env = played_by("plays", num_agents=1)
    async with mesh(env, episodes=3) as m:
        player = m.worker._player
        slot, clock, began = player._agents.pool.limiter("Tag", env.agent_runner), player._clock, list[float]()
        limited = clock.limited
        monkeypatch.setattr(clock, "limited", lambda limit, seconds: began.append(seconds) or limited(limit, seconds))
        async with slot:
            await wait_until(lambda: len(slot._waiters or ()) == 3)
            assert began == []
        await wait_until(lambda: len(m.buffer.submitted) == 3)
        assert sorted(began) == [env.agent_runner.timeout_s] * 3 + [env.episode_timeout_s] * 3


@pytest.mark.parametrize("named", [{}, {"path": "a:b", "command": ("c",)}, {"path": "module"}])
def test_an_agent_is_named_by_path_or_command(named: dict[str, Any]):
    with pytest.raises(ValidationError, match="module:function"):
        AgentRunner(**named)


def children_of(pid: int) -> set[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return {int(child) for child in text.split()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it is reaped between opening and reading
        return False
