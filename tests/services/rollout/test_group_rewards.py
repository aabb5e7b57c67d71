"""Rewards that compare a group's members: real workers and buffer, and a judge behind a real HTTP server."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.control.failing_episodes import FailingEpisodes, read_failing
from offbeat.services.messages.types import Group, StopReason
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.sample import GroupMember
from offbeat.services.rollout.actor import build_rewards
from offbeat.services.rollout.config import CustomEnv, OnEnvError
from offbeat.services.rollout.worker import EnvWorker
from tests.fakes_rollout import CountingEnv, FakeGeneration, FakeMetrics, worker_settings
from tests.services.buffer.buffer_play import RUN, Run, trajectory_for
from tests.services.reward.kinds.conftest import Service
from tests.services.reward.kinds.test_group_verdicts import prefers
from tests.services.reward.kinds.test_llm_judge import chat as judge_reply
from tests.services.rollout.worker_bench import custom
from tests.waiting import wait_until

HERE = f"{__name__}:"
JUDGE = {"name": "better", "kind": "llm_judge", "scope": "group", "model": "m", "max_attempts": 1}
LENGTH = {"name": "length", "kind": "function", "path": HERE + "num_words", "weight": 0.1}
SEEN: list[Sequence[GroupMember]] = []
MAY_COMPARE = threading.Event()


class EveryFifthFails(CountingEnv):
    steps = count()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if next(self.steps) % 5 == 0:
            raise RuntimeError("no slope")
        return super().step(action)


def num_words(sample: Any) -> float:
    return float(len(sample.response.split()))


def remember(samples: Sequence[GroupMember]) -> list[float]:
    SEEN.append(samples)
    return [float(len(samples))] * len(samples)


def wait_and_compare(samples: Sequence[GroupMember]) -> list[float]:
    MAY_COMPARE.wait()
    return [0.0] * len(samples)


class Reports:
    def __init__(self) -> None:
        self.of_workers: dict[str, Mapping[str, Any]] = {}

    async def show(self, worker_id: str, report: Mapping[str, Any]) -> None:
        self.of_workers[worker_id] = {**report, "at": time.time()}

    @property
    def failing(self) -> list[FailingEpisodes]:
        return read_failing(self.of_workers.values(), since=0.0)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def service() -> Iterator[Service]:
    SEEN.clear()
    service = Service()
    yield service
    service.close()


@pytest.fixture
def counting(tokenizer: Tokenizer) -> FakeGeneration:
    """Answers of one word, two words, three words, one word, ..."""
    left, end = tokenizer.token_to_id("Left"), tokenizer.token_to_id("<|im_end|>")
    numbers = count()
    return FakeGeneration(lambda _: (left,) * (next(numbers) % 3 + 1) + (end,))


@pytest.fixture
def play(run: Run, policy_folder: Path, chat: ChatFormat, counting: FakeGeneration, reports: Reports):
    @contextlib.asynccontextmanager
    async def make(num_workers: int, *rewards: dict[str, Any], **changes: Any) -> AsyncIterator[list[FakeMetrics]]:
        config = RewardsConfig.model_validate_json(json.dumps({"rewards": rewards})) if rewards else None
        envs = {"Count": custom("CountingEnv", max_steps=1)}
        settings = worker_settings(policy_folder, **{"custom_envs": envs, "rewards": config, **changes})
        metrics = [FakeMetrics() for _ in range(num_workers)]
        workers = [
            EnvWorker(
                settings,
                f"w{number}",
                buffer=AsyncRolloutBuffer(run.async_redis, RUN),
                generation=counting,
                metrics=sink,
                chat=chat,
                board=reports,
                rewards=build_rewards(settings, None, chat) if rewards else None,
                clock=counting.clock,
            )
            for number, sink in enumerate(metrics)
        ]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            yield metrics
        finally:
            for worker in workers:
                worker.stop()
            await asyncio.gather(*running)

    return make


async def take(run: Run, num_groups: int) -> list[Group]:
    groups: list[Group] = []

    def look() -> bool:
        group = run.learner.take(0)
        if group is not None:
            groups.append(group)
        return len(groups) == num_groups

    await wait_until(look)
    return groups


def judged(service: Service, verdict: Callable[[str], str], **settings: Any) -> dict[str, Any]:
    service.answer = lambda asked: judge_reply(verdict(asked["messages"][-1]["content"]))
    return {**JUDGE, "url": service.url.removesuffix("/score") + "/v1", **settings}


@pytest.mark.parametrize("compare", ["pairs", "ranking"])
async def test_groups_of_several_workers_are_compared_by_a_judge(run: Run, play, service: Service, compare: str):
    run.reconfigure(group_size=3, redundancy=1, groups_per_step=2)
    judge = judged(service, prefers(lambda text: text.count("Left")), compare=compare)
    async with play(2, judge, LENGTH) as metrics:
        groups = await take(run, 4)
    for group in groups:
        words = [trajectory.metrics["reward/length"] for trajectory in group.trajectories]
        for own, trajectory in zip(words, group.trajectories, strict=True):
            others = words.copy()
            others.remove(own)
            share = sum(1.0 if own > other else 0.5 if own == other else 0.0 for other in others) / 2
            assert trajectory.metrics["reward/better"] == share
            assert trajectory.reward == pytest.approx(0.5 + share + 0.1 * own), (
                "the env's, the judge's and the length's"
            )
    values = [record.values for sink in metrics for record in sink.records if record.labels.get("kind") == "train"]
    assert any("reward/better" in each for each in values)
    assert any("group_reward_s" in each for each in values)


async def test_a_judge_that_gives_no_verdict_fails_groups_by_reason(run: Run, play, service: Service):
    run.reconfigure(max_attempts=2)
    async with play(1, judged(service, lambda _: "Hm.")):
        await wait_until(lambda: run.learner.counters().failed.get("reward_malformed", 0) >= 2)
    assert run.learner.take(0) is None
    assert set(run.learner.counters().failed) == {"reward_malformed"}


async def test_a_judge_that_recovers_loses_no_group(run: Run, play, service: Service):
    failures = iter(["Hm."])
    verdict = prefers(lambda text: text.count("Left"))
    async with play(1, judged(service, lambda prompt: next(failures, None) or verdict(prompt))):
        groups = await take(run, 2)
    assert all("reward/better" in t.metrics for group in groups for t in group.trajectories)
    assert run.learner.counters().failed == {}


async def test_a_judge_that_always_fails_is_told_from_envs_that_do(run: Run, play, service: Service, reports: Reports):
    run.reconfigure(max_groups_in_flight=100, max_staleness=100.0)
    async with play(2, judged(service, lambda _: "Hm.")):
        await wait_until(lambda: any(each.all_failed for each in reports.failing))
    episodes, comparisons = reports.failing
    assert (episodes.failed, episodes.finished > 0, comparisons.finished) == (0, True, 0)
    text = comparisons.describe_all()
    assert text.startswith(f"all of the first {comparisons.failed} comparisons of groups failed: reward_malformed: ")
    assert "\nFix rewards." in text


async def test_episodes_whose_groups_wait_for_slow_rewards_have_not_failed(run: Run, play, reports: Reports):
    run.reconfigure(max_groups_in_flight=100, max_staleness=100.0, max_attempts=9)
    function = {"name": "slow", "kind": "function", "scope": "group", "path": HERE + "wait_and_compare"}
    envs = {"Count": CustomEnv(env_type=HERE + "EveryFifthFails", execution="inline", max_steps=1)}
    MAY_COMPARE.clear()
    try:
        async with play(1, {**function, "timeout_s": 600.0}, custom_envs=envs):
            await wait_until(lambda: bool(reports.failing[0].limit) and reports.failing[0].failed >= 16)
            episodes, comparisons = reports.failing
            assert (episodes.all_failed, comparisons.all_failed) == (False, False)
            assert (episodes.finished > episodes.failed, comparisons.finished) == (True, 0)
            MAY_COMPARE.set()
            await take(run, 1)
    finally:
        MAY_COMPARE.set()


async def test_a_run_that_resumes_without_rewards_trains_the_groups_that_wait_for_some(
    run: Run, play, reports: Reports
):
    run.reconfigure(total_groups=1)
    for task in await run.buffer.claim("gone", 2):
        await run.buffer.submit("gone", task, trajectory_for(task), b"sample")
    async with play(1):
        (group,) = await take(run, 1)
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0]
    assert [each.failed for each in reports.failing] == [0, 0]


async def test_evaluations_leave_out_what_compares(run: Run, play, service: Service):
    run.learner.start_eval("e1", 2, sampling_name="greedy", min_version=0)
    async with play(1, judged(service, prefers(len)), LENGTH):
        await wait_until(lambda: run.learner.eval_result("e1") is not None)
    evaluated = run.learner.eval_result("e1")
    assert evaluated is not None
    for trajectory in evaluated:
        assert "reward/better" not in trajectory.metrics
        assert trajectory.reward == pytest.approx(0.5 + 0.1 * trajectory.metrics["reward/length"])


async def test_an_episode_that_an_error_ended_is_not_compared(run: Run, play, tmp_path: Path):
    run.reconfigure(group_size=3)
    env_config = {"how": "raise", "marker": str(tmp_path / "marker")}  # one episode's second step
    env = custom("BadEnv", env_config=env_config, on_env_error=OnEnvError(reward=-1.0))
    function = {"name": "seen", "kind": "function", "scope": "group", "path": HERE + "remember"}
    async with play(1, function, custom_envs={"Count": env}):
        groups = await take(run, 4)  # all that may start
    ended = [t for group in groups for t in group.trajectories if t.stop_reason is StopReason.ERROR]
    assert [t.reward for t in ended] == [0.5 - 1.0]
    for group in groups:
        compared = [t for t in group.trajectories if "reward/seen" in t.metrics]
        assert {t.metrics["reward/seen"] for t in compared} == {float(len(compared))}
        assert len(compared) == 3 - sum(t.stop_reason is StopReason.ERROR for t in group.trajectories)
    assert {member.own_reward for members in SEEN for member in members} == {1.5}
