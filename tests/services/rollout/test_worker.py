import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import BufferError, RetryableError
from offbeat.services.messages.types import (
    EpisodeKind,
    EpisodeTask,
    GenerateRequest,
    StopReason,
)
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig, RolloutConfig
from offbeat.services.rollout.tasks import eval_task, train_task
from offbeat.services.rollout.worker import EnvWorker, WorkerEnd
from offbeat.services.telemetry import Partial, merge_all
from tests.fakes_rollout import (
    HERE,
    FakeBuffer,
    FakeGeneration,
    FakeMetrics,
    train_episode,
    worker_settings,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def walker(tokenizer: Tokenizer):
    """Answers each prompt in a way that depends on the prompt alone."""
    ids = [tokenizer.token_to_id(word) for word in ("Left", "Down", "Right", "Up")]
    end = tokenizer.token_to_id("<|im_end|>")

    def answer(request: GenerateRequest) -> tuple[int, ...]:
        return (ids[sum(request.prompt) % 4], end)

    return answer


def custom(env: str, execution: str = "inline", **changes: Any) -> CustomEnv:
    rules = {"max_steps": 5, "max_tokens_per_step": 4, **changes}
    return CustomEnv(env_type=HERE + env, execution=execution, **rules)


class Bench:
    """A worker with fakes around it, and its running loop."""

    def __init__(self, worker: EnvWorker, buffer: FakeBuffer, generation: FakeGeneration, metrics: FakeMetrics) -> None:
        self.worker = worker
        self.buffer = buffer
        self.generation = generation
        self.metrics = metrics
        self.running: asyncio.Task[WorkerEnd] = asyncio.create_task(worker.run())

    async def until_done(self, count: int) -> None:
        await wait_until(lambda: len(self.buffer.submitted) + len(self.buffer.failed) >= count or self.running.done())
        if self.running.done():
            self.running.result()


@pytest.fixture
def bench(policy_folder: Path, chat: ChatFormat, tokenizer: Tokenizer):
    @contextlib.asynccontextmanager
    async def make(
        *tasks: EpisodeTask, generation: FakeGeneration | None = None, worker_id: str = "w", **changes: Any
    ) -> AsyncIterator[Bench]:
        settings = worker_settings(policy_folder, **changes)
        buffer, metrics = FakeBuffer(tasks), FakeMetrics()
        client = generation or FakeGeneration(walker(tokenizer))
        worker = EnvWorker(settings, worker_id, buffer=buffer, generation=client, metrics=metrics, chat=chat)
        made = Bench(worker, buffer, client, metrics)
        try:
            yield made
        finally:
            worker.stop()
            await asyncio.gather(made.running, return_exceptions=True)

    return make


def group(number: int, size: int = 4) -> list[EpisodeTask]:
    return [train_episode(number, index) for index in range(size)]


async def test_claimed_episodes_are_played_and_submitted(bench, policy_folder: Path):
    tasks = [*group(0), *group(1)]
    async with bench(*tasks) as b:
        await b.until_done(8)
    assert set(b.buffer.submitted) == set(tasks)
    settings = worker_settings(policy_folder)
    for task, trajectory in b.buffer.submitted.items():
        expected = train_task(settings, settings.seed, task.number)
        assert (trajectory.tag, trajectory.seed) == expected
        assert (trajectory.group_id, trajectory.index, trajectory.worker_id) == (task.group_id, task.index, "w")
        assert trajectory.version_range() == (3, 3)


async def test_members_of_a_group_begin_alike_on_any_worker(bench):
    first_prompts: dict[str, set[tuple[int, ...]]] = {}
    for worker_id, members in (("w1", [0, 2]), ("w2", [1, 3])):
        async with bench(*(train_episode(n, i) for n in range(3) for i in members), worker_id=worker_id) as b:
            await b.until_done(6)
        for task, trajectory in b.buffer.submitted.items():
            start = trajectory.turns[0].start
            first_prompts.setdefault(task.group_id, set()).add(tuple(trajectory.segments[0].tokens[:start].tolist()))
    assert [len(prompts) for prompts in first_prompts.values()] == [1, 1, 1]
    assert len(set.union(*first_prompts.values())) == 3


async def test_workers_use_the_first_draw_of_a_sampler_for_a_group(bench):
    lake = CustomEnv(env_type="frozen_lake", max_steps=2, execution="inline")
    manager = EnvManagerConfig.model_validate(
        {"group_size": 4, "task_sampler": {"path": "offbeat.envs.task_samplers:Levels", "args": {"review": 0.0}}}
    )
    envs = {"Easy": lake, "Hard": lake}
    async with bench(*group(0), custom_envs=envs, train_env_manager=manager) as b:
        await b.until_done(4)
        b.buffer.sampler_state = '{"level": 1, "seen": []}'
        b.buffer.drawn[2] = '["Easy", 99]'
        b.buffer.offer(*group(1), *group(2))
        await b.until_done(12)
        played = {task.number: (each.tag, each.seed) for task, each in b.buffer.submitted.items()}
        assert [played[number][0] for number in range(3)] == ["Easy", "Hard", "Easy"]
        assert played[2] == ("Easy", 99)
        assert len({(task.number, each.tag, each.seed) for task, each in b.buffer.submitted.items()}) == 3


async def test_no_more_calls_of_an_env_are_under_way_than_its_share(bench):
    crowd = custom("Crowd", "thread", max_steps=3, max_env_step_concurrent=4)
    rollout = RolloutConfig(max_env_num_per_worker=16, num_workers=2)
    async with bench(*group(0, 12), custom_envs={"Crowd": crowd}, rollout=rollout) as b:
        await b.until_done(12)
        max_running = max(each.metrics["inside"] for each in b.buffer.submitted.values())
        assert max_running == 2


@pytest.mark.parametrize(("locked", "most"), [(True, 1), (False, 2)])
async def test_use_thread_lock_serializes_resets_and_steps(bench, locked: bool, most: int):
    """Together with the tag's share of `max_env_step_concurrent`, whichever is smaller."""
    crowd = custom("Crowd", "thread", max_steps=1, max_env_step_concurrent=2, use_thread_lock=locked)
    async with bench(*group(0, 2), custom_envs={"Crowd": crowd}) as b:
        await b.until_done(2)
        assert max(each.metrics["inside"] for each in b.buffer.submitted.values()) == most


async def test_env_instruction_stands_after_the_system_template(bench):
    lake = CustomEnv(env_type="frozen_lake", max_steps=1, agent_system_template="Avoid", env_instruction="Walk to G")
    async with bench(*group(0, 1), custom_envs={"Lake": lake}, rollout=RolloutConfig(keep_text=True)) as b:
        await b.until_done(1)
        (trajectory,) = b.buffer.submitted.values()
        assert trajectory.text[0] == "Avoid\nWalk to G"


async def test_evaluation_uses_held_out_maps_text_and_its_own_sampling(bench, policy_folder: Path):
    tasks = [EpisodeTask(EpisodeKind.EVAL, "before", n, n, 0, min_version=2, sampling_name="greedy") for n in range(4)]
    async with bench(*tasks) as b:
        await b.until_done(4)
    settings = worker_settings(policy_folder)
    for task, trajectory in b.buffer.submitted.items():
        assert (trajectory.tag, trajectory.seed) == eval_task(settings, settings.seed, task.number)
        assert trajectory.text[0] == "Walk P to G . Avoid O ."
        assert len(trajectory.text) == 1 + 2 * len(trajectory.turns)
    requests = [request for call in b.generation.calls for request in call]
    assert {(r.sampling.temperature, r.min_version) for r in requests} == {(0.0, 2)}


async def test_no_more_episodes_are_played_at_a_time_than_allowed(bench, tokenizer: Tokenizer):
    max_running = 0

    def watch(request: GenerateRequest) -> tuple[int, ...]:
        nonlocal max_running
        max_running = max(max_running, b.worker.num_playing)
        return walker(tokenizer)(request)

    async with bench(
        *group(0, 40), generation=FakeGeneration(watch), rollout=RolloutConfig(max_env_num_per_worker=6)
    ) as b:
        await b.until_done(40)
    assert max_running == 6
    assert len(b.buffer.submitted) == 40


async def test_turns_of_many_episodes_share_calls(bench):
    async with bench(*group(0, 16)) as b:
        await b.until_done(16)
    turns = sum(len(trajectory.turns) for trajectory in b.buffer.submitted.values())
    assert turns == sum(len(call) for call in b.generation.calls)
    assert len(b.generation.calls) <= 12 + 2


async def test_a_worker_notices_later_work(bench):
    async with bench() as b:
        await wait_until(lambda: b.buffer.heartbeats > 0)
        b.buffer.offer(*group(0))
        await b.until_done(4)


async def test_one_bad_env_harms_no_other_episode(bench):
    envs = {"Bad": custom("BadEnv", env_config={"how": "raise"}), "Good": custom("CountingEnv")}
    async with bench(*group(0), *group(1), custom_envs=envs) as b:
        await b.until_done(8)
        assert not b.running.done()
    assert [reason for _, reason in b.buffer.failed] == ["step_error"] * 4
    assert {task.number for task, _ in b.buffer.failed} == {0}
    assert {task.number for task in b.buffer.submitted} == {1}


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_hung_env_is_retried_with_the_same_seed(bench, tmp_path: Path, execution: str):
    config = {"how": "hang", "marker": str(tmp_path / "hung")}
    env = custom("BadEnv", execution, env_config=config, step_timeout_s=3.0)
    async with bench(train_episode(0), custom_envs={"Bad": env}) as b:
        b.buffer.retries = True
        await wait_until(lambda: bool(b.buffer.submitted))
    assert b.buffer.failed == [(train_episode(0), "step_timeout")]
    ((task, trajectory),) = b.buffer.submitted.items()
    assert (task.attempt, trajectory.attempt) == (1, 1)
    assert trajectory.seed == train_task(worker_settings(tmp_path, custom_envs={"Bad": env}), 7, 0).seed


async def test_a_crashed_env_process_fails_its_episode_alone(bench, tmp_path: Path):
    env = custom("BadEnv", "process", env_config={"how": "crash", "marker": str(tmp_path / "crashed")})
    async with bench(*group(0, 3), custom_envs={"Bad": env}) as b:
        await wait_until(lambda: len(b.buffer.submitted) + len(b.buffer.failed) == 3)
    assert [reason for _, reason in b.buffer.failed] == ["env_crashed"]
    assert len(b.buffer.submitted) == 2


@pytest.mark.parametrize(
    ("execution", "how", "reason"), [("inline", "raise", "step_error"), ("process", "crash", "env_crashed")]
)
async def test_an_error_of_the_env_ends_the_episode_with_the_rules_reward(bench, execution: str, how: str, reason: str):
    """The rewards and tokens of earlier steps stay; a failing episode is trained, not repeated until it passes."""
    rule = {"reward": -2.0, "reasons": (reason,)}
    env = custom("BadEnv", execution, env_config={"how": how}, on_env_error=rule)
    async with bench(*group(0, 2), custom_envs={"Bad": env}) as b:
        await b.until_done(2)
    assert not b.buffer.failed
    for trajectory in b.buffer.submitted.values():
        assert (trajectory.stop_reason, [turn.reward for turn in trajectory.turns]) == (StopReason.ERROR, [0.5, -2.0])
        assert all(trajectory.segments[0].loss_mask[turn.start : turn.end].all() for turn in trajectory.turns)
        assert (trajectory.metrics["ended_by_error"], trajectory.metrics["success"]) == (1.0, 0.0)
        assert trajectory.error.startswith(f"{reason}: ")
    counts = merge_all(record.values for record in b.metrics.records if record.labels.get("tag") == "Bad")
    assert counts[f"error/{reason}"].value == counts["stop/error"].value == 2.0


@pytest.mark.parametrize(("how", "when"), [("raise", "reset"), ("hang", "step")])
async def test_errors_that_the_rule_does_not_name_are_tried_again(bench, how: str, when: str):
    env = custom(
        "BadEnv", "process", env_config={"how": how, "when": when}, step_timeout_s=2.0, on_env_error={"reward": -1.0}
    )
    async with bench(train_episode(0), custom_envs={"Bad": env}) as b:
        await b.until_done(1)
    assert [reason for _, reason in b.buffer.failed] == [{"reset": "reset_error", "step": "step_timeout"}[when]]


async def test_an_episode_timeout_fails_it_and_aborts_its_turn(bench, tokenizer: Tokenizer):
    env = custom("CountingEnv", episode_timeout_s=2.0)
    slow = FakeGeneration(walker(tokenizer), delay_s=lambda _: 60.0)
    async with bench(train_episode(0), generation=slow, custom_envs={"Slow": env}) as b:
        await b.until_done(1)
        await wait_until(lambda: len(slow.aborted) == 1)
    assert b.buffer.failed == [(train_episode(0), "episode_timeout")]


async def test_only_the_turn_in_flight_is_lost_when_a_replica_dies(bench, tokenizer: Tokenizer):
    """The replica dies at every third call; each episode goes on from its tokens."""

    class Dying(FakeGeneration):
        async def generate(self, requests):
            if len(self.calls) % 3 == 2:
                self.errors = [RetryableError("died")]
            async for completions in super().generate(requests):
                yield completions

    async with bench(*group(0), generation=Dying(walker(tokenizer))) as b:
        await b.until_done(4)
    async with bench(*group(0)) as untroubled:
        await untroubled.until_done(4)
    assert b.buffer.failed == []
    for task, trajectory in b.buffer.submitted.items():
        expected = untroubled.buffer.submitted[task].segments[0].tokens
        assert trajectory.segments[0].tokens.tolist() == expected.tolist()


async def test_cancelled_episodes_stop_and_their_turns_are_aborted(bench, tokenizer: Tokenizer):
    stuck = FakeGeneration(walker(tokenizer), delay_s=lambda _: 60.0)
    tasks = group(0)
    async with bench(*tasks, generation=stuck) as b:
        await wait_until(lambda: b.worker.num_playing == 4 and bool(stuck.calls))
        b.buffer.to_cancel = tasks[:3]
        await wait_until(lambda: b.worker.num_playing == 1)
        await wait_until(lambda: len(stuck.aborted) == 3)
        assert b.buffer.failed == []
        assert not b.running.done()


async def test_places_of_cancelled_episodes_are_taken_by_others(bench, tokenizer: Tokenizer):
    stuck = FakeGeneration(walker(tokenizer), delay_s=lambda r: 60.0 if len(r.prompt) > 0 and stuck_now else 0.0)
    stuck_now = True
    async with bench(*group(0, 2), generation=stuck, rollout=RolloutConfig(max_env_num_per_worker=2)) as b:
        await wait_until(lambda: bool(stuck.calls))
        b.buffer.offer(*group(1, 2))
        stuck_now = False
        b.buffer.to_cancel = group(0, 2)
        await b.until_done(2)
    assert {task.number for task in b.buffer.submitted} == {1}
    assert merge_all(record.values for record in b.metrics.records)["cancelled"].value == 2


async def test_while_redis_is_silent_the_worker_waits_and_loses_nothing(bench):
    async with bench(*group(0)) as b:
        await wait_until(lambda: b.worker.num_playing > 0)
        b.buffer.down = True
        b.buffer.queue += group(1)
        await wait_until(lambda: b.buffer.refused >= 6)
        assert not b.running.done()
        b.buffer.down = False
        await b.until_done(8)
    assert len(b.buffer.submitted) == 8
    assert b.buffer.failed == []


async def test_a_drained_worker_finishes_its_episodes_and_claims_no_more(bench, tokenizer: Tokenizer):
    open_gate = False
    slow = FakeGeneration(walker(tokenizer), delay_s=lambda _: 0.0 if open_gate else 0.05)
    async with bench(*group(0), generation=slow) as b:
        await wait_until(lambda: b.worker.num_playing == 4)
        b.worker.drain()
        b.buffer.offer(*group(1))
        open_gate = True
        await b.until_done(4)
        await wait_until(lambda: b.buffer.heartbeats >= 3)
        assert {task.number for task in b.buffer.submitted} == {0}


async def test_a_paused_run_resumes_where_it_stopped(bench):
    async with bench() as b:
        b.buffer.draining = True
        await wait_until(lambda: b.buffer.heartbeats >= 2)
        b.buffer.offer(*group(0))
        await wait_until(lambda: b.buffer.heartbeats >= 5)
        assert b.buffer.claimed == []
        b.buffer.draining = False
        await b.until_done(4)


async def test_a_stopped_worker_gives_its_episodes_back(bench, tokenizer: Tokenizer):
    stuck = FakeGeneration(walker(tokenizer), delay_s=lambda _: 60.0)
    async with bench(*group(0), generation=stuck) as b:
        await wait_until(lambda: b.worker.num_playing == 4)
        b.worker.stop()
        async with asyncio.timeout(30):
            assert await b.running is WorkerEnd.STOPPED
    assert (b.worker.num_playing, b.buffer.released) == (0, 1)
    assert (b.buffer.failed, b.buffer.submitted) == ([], {})
    assert "cancelled" not in merge_all(record.values for record in b.metrics.records)


async def test_a_stopped_worker_does_not_wait_for_a_hung_env(bench, tmp_path: Path):
    env = custom("WaitingEnv", "thread", env_config={"gate": str(tmp_path / "gate")}, step_timeout_s=600.0)
    async with bench(train_episode(0), custom_envs={"Stuck": env}) as b:
        await wait_until(lambda: bool(b.generation.calls))
        b.worker.stop()
        async with asyncio.timeout(30):
            await b.running
        (tmp_path / "gate").touch()
    assert b.buffer.released == 1


async def test_a_worker_whose_threads_all_hang_asks_to_be_replaced(bench, tmp_path: Path):
    env = custom("WaitingEnv", "thread", env_config={"gate": str(tmp_path / "gate")}, step_timeout_s=0.1)
    config = RolloutConfig(num_threads=2, max_env_num_per_worker=2)
    async with bench(*group(0, 2), custom_envs={"Stuck": env}, rollout=config) as b:
        async with asyncio.timeout(30):
            assert await b.running is WorkerEnd.WORN_OUT
        (tmp_path / "gate").touch()
    # A heartbeat may see the last thread hang before its episode has failed; then that one is given back.
    assert {reason for _, reason in b.buffer.failed} <= {"step_timeout"}
    assert b.buffer.released == 1


async def test_a_task_that_cannot_be_is_failed_not_lost(bench):
    impossible = EpisodeTask(EpisodeKind.TRAIN, "run-0", 0, 0, 0, 0, sampling_name="nonesuch")
    async with bench(impossible, *group(1)) as b:
        await b.until_done(5)
    assert b.buffer.failed == [(impossible, "internal_error")]


async def test_a_trajectory_that_the_buffer_refuses_is_failed(bench):
    async with bench() as b:

        async def refuse(*_: object):
            raise BufferError("no")

        b.buffer.submit = refuse
        b.buffer.offer(train_episode(0))
        await b.until_done(1)
    assert b.buffer.failed == [(train_episode(0), "internal_error")]


async def test_an_episode_whose_failure_cannot_be_reported_ends_the_worker(bench):
    envs = {"Bad": custom("BadEnv", env_config={"how": "raise"})}
    async with bench(custom_envs=envs) as b:

        async def refuse(*_: object):
            raise BufferError("no")

        b.buffer.fail = refuse
        b.buffer.offer(train_episode(0))
        with pytest.raises(BufferError):
            await asyncio.wait_for(b.running, 30)
    assert b.buffer.released == 1


async def test_a_users_env_runs_and_is_reused(bench):
    async with bench(
        *group(0, 6), custom_envs={"Mine": custom("CountingEnv")}, rollout=RolloutConfig(max_env_num_per_worker=2)
    ) as b:
        await b.until_done(6)
        idle = [len(envs) for envs in b.worker._envs._idle.values()]
    assert idle == [2]
    for trajectory in b.buffer.submitted.values():
        assert (trajectory.stop_reason, len(trajectory.turns), trajectory.metrics["total"]) == (
            StopReason.TERMINATED,
            3,
            6.0,
        )


async def test_metric_records_count_episodes_turns_and_failures(bench):
    envs = {"Bad": custom("BadEnv", env_config={"how": "raise"}), "Good": custom("CountingEnv")}
    async with bench(*group(0), *group(1), custom_envs=envs) as b:
        await b.until_done(8)
    by_tag = {
        tag: merge_all(record.values for record in b.metrics.records if record.labels.get("tag") == tag)
        for tag in ("Bad", "Good")
    }
    good, bad = by_tag["Good"], by_tag["Bad"]
    assert good["episodes"] == Partial("sum", 4.0, good["episodes"].count)
    assert (good["turns"].value, good["tokens_sampled"].value) == (12.0, 24.0)
    assert (good["reward"].value, good["success"].value, good["reward"].count) == (1.5, 1.0, 4.0)
    assert good["env_s"].count == 16
    assert bad["failed/step_error"].value == bad["failures"].value == 4.0
    assert all(record.source == "rollout" for record in b.metrics.records)
    assert all(record.labels["worker"] == "w" for record in b.metrics.records)


async def test_a_worker_keeps_its_heartbeat_while_finding_eval_tasks(bench, tmp_path: Path):
    marker = tmp_path / "found"
    episode = EpisodeTask(EpisodeKind.EVAL, "eval", 0, 0, 0, 0, sampling_name="greedy")
    envs = {"Slow": custom("SlowTasksEnv", env_config={"marker": str(marker)})}
    async with bench(episode, custom_envs=envs) as b:
        await wait_until(lambda: bool(b.buffer.claimed))
        num_heartbeats = b.buffer.heartbeats
        await wait_until(lambda: b.buffer.heartbeats > num_heartbeats + 2)
        marker.touch()
        await b.until_done(1)
    assert list(b.buffer.submitted) == [episode]
    assert marker.read_text() == ""


@pytest.mark.parametrize(("train", "evaluation", "most"), [(None, None, (8, 8)), (3, 2, (3, 2)), (7, None, (7, 8))])
async def test_training_and_evaluation_have_limits_of_their_own(
    bench, tokenizer: Tokenizer, train: int | None, evaluation: int | None, most: tuple[int, int]
):
    """Both hold at once, within that of the worker, and a freed slot of one kind is taken without new work."""
    seen, play = {"train": 0, "eval": 0, "both": 0}, walker(tokenizer)

    def watch(request: Any) -> Any:
        kinds = [task.kind for task in b.worker._playing]
        for kind in EpisodeKind:
            seen[kind.value] = max(seen[kind.value], kinds.count(kind))
        seen["both"] = max(seen["both"], len(kinds))
        return play(request)

    evaluations = [replace(task, kind=EpisodeKind.EVAL, sampling_name="sampled") for task in group(100, 12)]
    async with bench(
        *group(0, 30),
        *evaluations,
        generation=FakeGeneration(watch),
        rollout=RolloutConfig(max_env_num_per_worker=8),
        train_env_manager=EnvManagerConfig(max_env_num_per_worker=train),
        val_env_manager=EnvManagerConfig(group_size=1, max_env_num_per_worker=evaluation),
    ) as b:
        await b.until_done(42)
    assert (seen["train"], seen["eval"]) <= most
    assert seen["train"] == most[0]
    assert seen["eval"] <= most[1]
    assert seen["both"] <= 8
