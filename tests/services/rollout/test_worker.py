import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from offbeat.envs.frozen_lake.rows import conversations, write_rows
from offbeat.services.generation.config import GeneratingArgs
from offbeat.services.messages.types import (
    EpisodeKind,
    EpisodeTask,
    GenerateRequest,
    StopReason,
)
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig, ManagerGeneratingArgs, RolloutConfig
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.sampled import is_sampled
from offbeat.services.rollout.tasks import eval_task, train_task
from offbeat.services.telemetry import Partial, merge_all
from tests.fakes_rollout import (
    FakeGeneration,
    train_episode,
    worker_settings,
)
from tests.services.rollout.worker_bench import custom, group, walker
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


async def test_a_baseline_has_the_limits_of_its_group(bench, tokenizer: Tokenizer):
    """At temperature 0; those of greedy evaluations may be others."""
    greedy = replace(train_episode(0, 4), sampling_name="greedy")
    evaluation = EpisodeTask(EpisodeKind.EVAL, "eval", 0, 0, 0, 0, sampling_name="greedy")
    generation = FakeGeneration(walker(tokenizer))
    own = EnvManagerConfig(generating_args=ManagerGeneratingArgs(max_new_tokens=2, stop_strings=()))
    args = GeneratingArgs(temperature=0.7, max_new_tokens=3, stop_strings=("Up",))
    async with bench(
        train_episode(0), greedy, evaluation, generation=generation, generating_args=args, val_env_manager=own
    ) as b:
        await b.until_done(3)
    sampled = {
        (request.sampling.temperature, request.sampling.max_new_tokens, request.sampling.stop_strings)
        for call in generation.calls
        for request in call
    }
    assert sampled == {(0.7, 3, ("Up",)), (0.0, 3, ("Up",)), (0.0, 2, ())}


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


async def test_a_failure_of_the_task_sampler_is_not_blamed_on_an_env(bench):
    manager = EnvManagerConfig.model_validate({"task_sampler": {"path": "offbeat.envs.task_samplers:Levels"}})
    async with bench(train_env_manager=manager) as b:
        b.buffer.sampler_state = "{}"
        b.buffer.offer(*group(0, 1))
        await b.until_done(1)
        assert [reason for _, reason in b.buffer.failed] == ["bad_task"]
        report = b.worker._outcomes.report()
    assert (report["key"], report["error"]) == ("train_env_manager.task_sampler", "bad_task: KeyError: 'level'")


async def test_no_more_calls_of_an_env_are_under_way_than_its_share(bench):
    crowd = custom("Crowd", "thread", max_steps=3, max_env_step_concurrent=4)
    rollout = RolloutConfig(max_env_num_per_worker=16, num_workers=2)
    async with bench(*group(0, 12), custom_envs={"Crowd": crowd}, rollout=rollout) as b:
        await b.until_done(12)
        max_running = max(each.metrics["inside"] for each in b.buffer.submitted.values())
        assert max_running == 2


@pytest.mark.parametrize(("locked", "most"), [(True, 1), (False, 2)])
async def test_use_thread_lock_serializes_constructors_and_steps(bench, locked: bool, most: int):
    """Together with the tag's share of `max_env_step_concurrent`, whichever is smaller."""
    rules = {"max_steps": 1, "max_env_step_concurrent": 2, "env_config": {"waits_when_made": True}}
    crowd = custom("Crowd", "thread", **rules, use_thread_lock=locked)
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
    async with bench(*tasks, val_env_manager=EnvManagerConfig(group_size=2)) as b:
        await b.until_done(4)
    settings = worker_settings(policy_folder, val_env_manager=EnvManagerConfig(group_size=1))
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
        max_running = max(max_running, len(b.buffer.claimed) - len(b.buffer.submitted))
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


async def test_a_users_env_runs_and_is_reused(bench):
    async with bench(
        *group(0, 6), custom_envs={"Mine": custom("CountingEnv")}, rollout=RolloutConfig(max_env_num_per_worker=2)
    ) as b:
        await b.until_done(6)
        idle = [len(envs) for envs in b.worker._player.envs._idle.values()]
    assert idle == [2]
    for trajectory in b.buffer.submitted.values():
        assert (trajectory.stop_reason, len(trajectory.turns), trajectory.metrics["total"]) == (
            StopReason.TERMINATED,
            3,
            6.0,
        )


async def test_metric_records_count_episodes_turns_and_failures(bench):
    envs = {"Bad": custom("BadEnv", env_config={"how": "raise"}), "Good": custom("CountingEnv")}
    began_s = time.process_time()
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
    own = merge_all(record.values for record in b.metrics.records if "tag" not in record.labels)
    assert 0 < own["cpu_s"].value <= time.process_time() - began_s
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
        kinds = [task.kind for task in b.buffer.claimed if task not in b.buffer.submitted]
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


async def test_a_share_of_rows_has_the_policys_response(bench, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, conversations(16))
    settings = {"pipeline": "distill", "data": DataConfig(dataset_name=rows), "sampled_share": 0.5, "seed": 4}
    tasks = [train_episode(number, 0) for number in range(16)]
    async with bench(*tasks, sequence_length=512, **settings) as b:
        await b.until_done(16)
        asked = {tuple(request.prompt) for call in b.generation.calls for request in call}
    sampled = {task.number for task, each in b.buffer.submitted.items() if each.metrics["sampled"]}
    assert sampled == {number for number in range(16) if is_sampled(number, 4, 0.5)}
    assert 0 < len(sampled) < 16
    prompts = set[tuple[int, ...]]()
    for task, each in b.buffer.submitted.items():
        if task.number in sampled:
            prompts.add(tuple(each.segments[0].tokens[: each.turns[0].start].tolist()))
            assert each.version_range() == (3, 3)
    assert prompts == asked
