"""Offbeat's own tasks: each solution earns 1, and doing nothing 0."""

import pytest

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from offbeat.envs.harbor import HarborConfig, HarborEnv
from offbeat.envs.harbor.obstacles import find_obstacles
from offbeat.envs.harbor.report import describe_task
from offbeat.envs.harbor.task import HarborTask, find_tasks
from offbeat.envs.harbor.task_set import OWN_TASKS, load_split
from offbeat.envs.harbor.trial import TaskTrial
from offbeat.envs.harbor.vocabulary import solution_commands
from offbeat.envs.sandbox import platform_isolation
from offbeat.envs.sandbox.shell import ShellLimits
from tests.envs.harbor.task_folder import TaskFolder, needs_shell
from tests.envs.sandbox.images import require_image

pytestmark = pytest.mark.slow
TASKS = find_tasks(OWN_TASKS)


def test_there_are_twenty_and_none_needs_a_container():
    assert len(TASKS) == 20
    assert {task.name: found for task in TASKS if (found := find_obstacles(task))} == {}
    assert {task.file.schema_version for task in TASKS} == {"1.4"}


def test_the_splits_are_disjoint_and_cover_all():
    train, held_out = (load_split(HarborConfig(split=split)) for split in ("train", "held_out"))
    assert {task.name for task in (*train, *held_out)} == {task.name for task in TASKS}
    assert (len(train), len(held_out)) == (17, 3)


@needs_shell
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_solution_earns_one_and_doing_nothing_zero(task: HarborTask):
    trial = TaskTrial(task, ShellLimits())
    try:
        for step in task.steps:
            trial.begin_step(step)
            assert trial.verify(step, 20).rewards == {"reward": 0.0}
            trial.begin_step(step)
            assert trial.solve(step, 20)[1:3] == (0, False)
            assert trial.verify(step, 20).rewards == {"reward": 1.0}
    finally:
        trial.close()


@needs_shell
@pytest.mark.parametrize("name", ["fix-mean", "two-reports"])
def test_an_episode_of_the_solutions_commands_succeeds(name: str):
    env = HarborEnv(HarborConfig(split="any", tasks=(name,), action_pattern="^(.*)$"))
    env.reset(seed=0)
    steps, rewards, terminated = env.task.steps, [], False
    for step in steps:
        assert not terminated
        for command in [*solution_commands(step), "submit"]:
            observation, reward, terminated, _, info = env.step(command)
            rewards.append(reward)
    assert (terminated, info["success"], info["submitted"], observation) == (True, True, True, "")
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


def test_a_sandbox_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.envs.sandbox.run.SUPERVISOR_CODE", "raise BlockingIOError(11, 'no process')")
    platform_isolation.cache_clear()
    ok, text = describe_task(TASKS[0], solve=True)
    assert not ok
    assert "ended without a result" in text


AT_NIGHT = ("two-reports", "link-current", "make-executable")


@pytest.mark.parametrize("name", ["fix-mean", *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)])
def test_a_task_is_solved_in_a_container(name: str):
    (task,) = (task for task in TASKS if task.name == name)
    ok, text = describe_task(task, solve=True, limits=ShellLimits(image=require_image()))
    assert ok, text
    assert "the solution earns 1, doing nothing 0" in text


def test_an_image_stands_for_a_tasks_own(task_folder: TaskFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.envs.harbor.obstacles.command_env", lambda: {"PATH": "/nowhere"})
    task_folder.write("environment/Dockerfile", "FROM pytorch/pytorch\nRUN pip install x\n")
    task_folder.write("tests/test.sh", "psql -c x\n")
    (task,) = find_tasks(task_folder.path)
    assert find_obstacles(task) == (
        "its Dockerfile: its image pytorch/pytorch",
        "its Dockerfile: RUN pip: needs the network",
        "its verifier calls psql (tests/test.sh), which is not installed here",
    )
    assert find_obstacles(task, image="ubuntu:24.04") == ("its Dockerfile: RUN pip: needs the network",)


@needs_shell
def test_the_env_meets_the_contract():
    report = check_contract("harbor", {}, num_seeds=2, max_turns=4)
    assert report.findings == []
    assert report.bytes_per_env < 16 * 1024


@needs_shell
def test_evaluation_runs_each_held_out_task_once():
    seeds = registry.distinct_seeds(3, 0, "harbor", {"split": "held_out"})
    env = registry.make("harbor", {"split": "held_out"})
    assert len({env.unwrapped.task_id(seed) for seed in seeds}) == 3
