"""Tasks in containers of their own images, built by podman of an image of this machine's programs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.envs.harbor.images import BUILT, check_machine, name_image, task_image
from offbeat.envs.harbor.obstacles import find_obstacles
from offbeat.envs.harbor.task import HarborTask, find_tasks
from offbeat.envs.harbor.trial import TaskTrial
from offbeat.envs.sandbox import IsolationError
from offbeat.envs.sandbox.shell import TASK_IMAGE, ShellLimits
from tests.envs.harbor.task_folder import TaskFolder, write_image_task
from tests.envs.sandbox.images import IMAGE, remove_images, require_image

pytestmark = pytest.mark.slow
LIMITS = ShellLimits(image=TASK_IMAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two tasks, whose images exist."""
    require_image()
    folder = tmp_path_factory.mktemp("tasks")
    for name, answer in (("first", "wrong"), ("second", "also-wrong")):
        write_image_task(folder / name, answer)
    done = CliRunner().invoke(app, ["env", "tasks", str(folder), "--image", TASK_IMAGE, "--build"])
    assert done.exit_code == 0, done.output
    yield folder
    remove_images(*(task_image(task) for task in find_tasks(folder)))


@pytest.fixture
def trial(folder: Path) -> Iterator[TaskTrial]:
    trial = TaskTrial(find_tasks(folder)[0], LIMITS)
    trial.begin_step(trial.task.steps[0])
    yield trial
    trial.close()


def test_each_task_is_solved_in_its_own_image(folder: Path):
    done = CliRunner().invoke(app, ["env", "tasks", str(folder), "--image", TASK_IMAGE, "--solve"])
    assert done.exit_code == 0, done.output
    assert "first: the solution earns 1, doing nothing 0" in done.output
    assert "second: the solution earns 1, doing nothing 0" in done.output


def test_an_episode_has_the_images_files_folder_and_variables_and_may_change_them(folder: Path):
    env = TaskFolder.env(
        write_image_task(folder / "second", "also-wrong"), tasks_dir=folder, sandbox={"image": TASK_IMAGE}
    )
    seeds = {env.task_id(seed): seed for seed in range(20)}
    env.reset(seed=seeds[str(folder / "second")])
    assert env.step("pwd; cat $ANSWER")[0] == "/testbed\nalso-wrong"
    assert env.step("rm -r /opt/own && mkdir -p /opt/mine && touch /usr/bin/own && echo ok")[0] == "ok"
    assert env.step("echo right > answer; echo done")[0] == "done"
    assert env.step("submit")[1] == 1


def at_night(cases: dict[str, Any], first: int) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly) for name in list(cases)[first:]]


ATTACKS = {
    "links by way of other folders": "mkdir /opt/z; ln -s /tests /opt/z/t; ln -s opt/z /z; ln -sf /z/t/expected answer",
    "a link that podman does not list": "ln -sf /tests/expected /etc/mtab; ln -sf /etc/mtab answer",
    "a link in memory": "ln -s /tests/expected /dev/shm/l; ln -sf /dev/shm/l answer",
    "a process that waits for the answer": "(until cp /tests/expected .out; do sleep 0.02; done; mv .out answer) &",
    "a link to the expected answer": "ln -sf /tests/expected answer",
    "a reward written ahead": "echo 1 > /logs/verifier/reward.txt",
}


@pytest.mark.parametrize("attack", [*list(ATTACKS)[:2], *at_night(ATTACKS, 2)])
def test_an_attack_on_the_verifier_earns_nothing(trial: TaskTrial, attack: str):
    trial.run(ATTACKS[attack], 20)
    assert trial.verify(trial.task.steps[0], 20).rewards == {"reward": 0.0}


FORGERIES = {
    "a program that would clean up": (
        "cd /usr/sbin || { mkdir /usr/sbin; cd /usr/sbin; }; printf '#!/bin/sh\\nrm $0\\n' > stat; chmod 755 stat",
        "/usr/sbin/stat",
    ),
    "a program of the same size and time": (
        "touch -r /usr/bin/cmp /tmp/t; head -c $(stat -c %s /usr/bin/cmp) /dev/zero > /tmp/f; cat /tmp/f > /usr/bin/cmp; "
        "touch -r /tmp/t /usr/bin/cmp",
        "/usr/bin/cmp",
    ),
    "another folder in place of /etc": (
        "mv /etc /testbed/etc; ln -s /testbed/etc /etc; touch /etc/ld.so.preload",
        "/etc/ld.so.preload",
    ),
    "a name that hides a link": ("mkdir -p 'x\nA '; ln -s /tests/expected 'x\nA /y'; touch 'x\nA /y'", "a line break"),
    "a program before the verifier's": ("cp /bin/true /usr/local/bin/cmp", "/usr/local/bin/cmp"),
    "a library of theirs": ("echo /testbed/x.so > /etc/ld.so.preload", "/etc/ld.so.preload"),
}


@pytest.mark.parametrize("forgery", [*list(FORGERIES)[:2], *at_night(FORGERIES, 2)])
def test_a_forged_operation_fails_the_episode(trial: TaskTrial, forgery: str):
    command, named = FORGERIES[forgery]
    trial.run(command, 20)
    rewards, error = trial.verify(trial.task.steps[0], 20)
    assert rewards == {}
    assert named in error


def test_the_name_of_a_built_image_changes_with_what_it_is_built_of(tmp_path: Path):
    names = [
        name_image(None, write_image_task(tmp_path / name, answer).path / "environment")
        for name, answer in ("aa", "ba", "cb")
    ]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith(f"{BUILT}:")
    assert name_image("org/image:1", tmp_path / "a/environment") == "org/image:1"


@pytest.fixture
def task_of(tmp_path: Path) -> Callable[..., HarborTask]:
    def load(**files: str) -> HarborTask:
        task = TaskFolder(tmp_path / "task")
        for name, text in files.items():
            task.write(
                {"toml": "task.toml", "dockerfile": "environment/Dockerfile", "test": "tests/test.sh"}[name], text
            )
        return find_tasks(task.path)[0]

    return load


def test_what_the_image_was_built_of_is_no_obstacle(task_of: Callable[..., HarborTask]):
    task = task_of(dockerfile="FROM a AS b\nRUN apt-get install x\nFROM c\nCOPY --from=b /x /x\n", test="psql -c x\n")
    assert find_obstacles(task, image=TASK_IMAGE) == ()
    assert len(find_obstacles(task)) > 3


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        (
            '[environment]\ndocker_image = "--privileged"\n',
            "environment.docker_image '--privileged': not the name of an image",
        ),
        ('[agent]\nuser = "me"\n', "the user me: a shell has one user"),
        ("[environment]\ngpus = 1\n", "a GPU"),
    ],
)
def test_what_an_image_does_not_give_is_an_obstacle(task_of: Callable[..., HarborTask], toml: str, says: str):
    assert says in find_obstacles(task_of(toml=toml), image=TASK_IMAGE)


def test_a_task_without_image_and_dockerfile_is_named(task_of: Callable[..., HarborTask]):
    task = task_of()
    task.dockerfile.unlink()
    assert "neither environment.docker_image nor environment/Dockerfile" in find_obstacles(task, image=TASK_IMAGE)[0]


def test_a_missing_image_is_named_before_a_run_with_what_to_do(tmp_path: Path):
    require_image()
    TaskFolder(tmp_path / "pulled").write("task.toml", '[environment]\ndocker_image = "none:1"\n')
    write_image_task(tmp_path / "built", "never")
    with pytest.raises(IsolationError) as error:
        check_machine(find_tasks(tmp_path), LIMITS)
    for part in (
        "images of 2 of 2 tasks can't be used here (`offbeat env tasks FOLDER --image task --build`",
        f"built: image {BUILT}:",
        "a run builds none",
        "pulled: image none:1 is not on this machine, and a run pulls none (`podman pull none:1`)",
    ):
        assert part in str(error.value)


def test_a_build_that_fails_is_named_and_the_others_are_listed(tmp_path: Path):
    require_image()
    write_image_task(tmp_path / "task").write("environment/Dockerfile", f"FROM {IMAGE}\nCOPY nothing /x\n")
    done = CliRunner().invoke(app, ["env", "tasks", str(tmp_path), "--image", TASK_IMAGE, "--build"])
    assert done.exit_code == 1
    assert "task: `podman build --tag" in done.output
    assert "0 of 1 tasks run here" in done.output


def test_building_without_own_images_is_refused(tmp_path: Path):
    done = CliRunner().invoke(app, ["env", "tasks", str(tmp_path), "--build"])
    assert done.exit_code == 2
    assert "--build has no effect without --image task" in done.output


def test_an_image_of_another_user_is_refused(tmp_path: Path):
    require_image()
    write_image_task(tmp_path / "task").write("environment/Dockerfile", f"FROM {IMAGE}\nUSER 1000\n")
    done = CliRunner().invoke(app, ["env", "tasks", str(tmp_path), "--image", TASK_IMAGE, "--build"])
    task = find_tasks(tmp_path)[0]
    remove_images(task_image(task))
    assert done.exit_code == 1
    assert "its user is 1000, and a shell's is root" in done.output
