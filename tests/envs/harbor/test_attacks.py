"""Attacks on a verifier for its reward, in both backends; each is shown to succeed without `protect`."""

import pytest

from offbeat.envs.harbor.machine import LOGS, TESTS, VERIFIER_LOGS
from offbeat.envs.harbor.task import find_tasks, read_files
from offbeat.envs.harbor.task_set import OWN_TASKS
from offbeat.envs.harbor.trial import TaskTrial, read_verdict
from offbeat.envs.sandbox.shell import ShellLimits
from tests.envs.harbor.task_folder import TaskFolder, needs_shell
from tests.envs.sandbox.test_shell import BACKENDS, limits_of

pytestmark = pytest.mark.slow
VERIFIER = """
for i in $(seq ${PATIENCE:-5}); do
  [ -e /app/out.txt ] || [ -e /logs/verifier/reward.json ] && break
  sleep 0.05
done
cmp -s /app/out.txt /tests/expected.txt && echo 1 > /logs/verifier/reward.txt
[ -f /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt
"""
ATTACKS = {
    "a reward written ahead": "echo 1 > /logs/verifier/reward.txt",
    "a better reward file": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a link to the expected answer": "ln -s /tests/expected.txt out.txt",
    "a link by way of the root": "ln -s / up; ln -s up/tests/expected.txt out.txt",
    "a link by a relative path": "ln -s ../tests/expected.txt out.txt",
    "a link in a folder that can't be listed": "mkdir d; ln -s /tests/expected.txt d/o; chmod 111 d; ln -s d/o out.txt",
    "a process that waits for the answer": "(until [ -s /tests/expected.txt ]; do sleep 0.02; done; "
    "cp /tests/expected.txt .out; mv .out out.txt) &",
    "a process that writes the reward": "cd /logs/verifier; setsid bash -c "
    "'while sleep 0.05; do echo 1 > .reward; mv .reward reward.json; done' &",
    "a shell's start-up file": "echo 'echo 1 > /logs/verifier/reward.txt' > ~/.bashrc; export BASH_ENV=~/.bashrc",
}
HARMLESS_UNPROTECTED = ("a shell's start-up file",)
"""Harmless to a verifier without protection, too, as variables end with their command."""
NIGHTLY = (BACKENDS[0], pytest.param(True, id="image", marks=pytest.mark.nightly))
"""Both backends, the container at night alone: `make test` has four attacks on it."""
IN_A_CONTAINER = (
    "a reward written ahead",
    "a link to the expected answer",
    "a process that writes the reward",
    "a shell's start-up file",
)


@pytest.fixture
def trial(task_folder: TaskFolder, request: pytest.FixtureRequest):
    task_folder.write("tests/test.sh", VERIFIER)
    task_folder.write("tests/expected.txt", "secret\n")
    (task,) = find_tasks(task_folder.path)
    trial = TaskTrial(task, limits_of(request.param))
    trial.begin_step(task.steps[0])
    yield trial
    trial.close()


@pytest.mark.parametrize("trial", BACKENDS, indirect=True)
@pytest.mark.parametrize("attack", IN_A_CONTAINER)
def test_an_attack_on_the_verifier_earns_nothing(trial: TaskTrial, attack: str):
    _attack(trial, attack)


@needs_shell
def test_a_task_below_a_readable_folder_can_not_be_read(task_folder: TaskFolder, monkeypatch: pytest.MonkeyPatch):
    """As Offbeat's own tasks in an installed package, below Python's folder."""
    (task,) = find_tasks(task_folder.path)
    packages = task_folder.path.parent
    packages.chmod(0o755)
    (packages / "module.py").touch()
    monkeypatch.setattr("offbeat.envs.sandbox.shell.READABLE", (str(packages),))
    trial = TaskTrial(task, ShellLimits())
    try:
        found = trial.run(
            f"cd {packages} && find . && umount {task.folder}; cat {task.folder}/tests/test.sh", 20
        ).output
        assert sorted(found.splitlines())[:3] == [".", f"./{task.folder.name}", "./module.py"]
        assert f"cat: {task.folder}/tests/test.sh: No such file or directory" in found
    finally:
        trial.close()


@needs_shell
def test_none_of_offbeats_own_tasks_can_be_read(monkeypatch: pytest.MonkeyPatch):
    """Those that are held out, too."""
    monkeypatch.setattr("offbeat.envs.sandbox.shell.READABLE", (str(OWN_TASKS.resolve().parent),))
    trial = TaskTrial(find_tasks(OWN_TASKS)[0], ShellLimits())
    try:
        found = trial.run(f"cd {OWN_TASKS.resolve().parent} && ls task_set.py && find tasks", 20).output
        assert found.split() == ["task_set.py", "tasks"]
    finally:
        trial.close()


@pytest.mark.parametrize("trial", NIGHTLY, indirect=True)
@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in IN_A_CONTAINER])
def test_another_attack_on_the_verifier_earns_nothing(trial: TaskTrial, attack: str):
    _attack(trial, attack)


def _attack(trial: TaskTrial, attack: str) -> None:
    trial.run(ATTACKS[attack], 20)
    verdict = trial.verify(trial.task.steps[0], 20)
    assert (verdict.rewards, verdict.error) == ({"reward": 0.0}, "")


@pytest.mark.parametrize("trial", NIGHTLY, indirect=True)
@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in HARMLESS_UNPROTECTED])
def test_it_would_succeed_without_protection(trial: TaskTrial, attack: str):
    trial.run(ATTACKS[attack], 20)
    shell = trial.machine.shell
    shell.upload(TESTS, read_files(trial.task.steps[0].tests[0]))
    patient = shell.command_env() | {"PATIENCE": "200"}
    result = shell.run(("bash", f"{TESTS}/test.sh"), cwd="/app", env=patient, timeout_s=20)
    assert read_verdict(shell, result).rewards == {"reward": 1.0}


@pytest.mark.parametrize("trial", NIGHTLY, indirect=True)
@pytest.mark.parametrize(
    "sabotage",
    [
        f"rm -rf {VERIFIER_LOGS}; ln -s /app {VERIFIER_LOGS}; ln -s /app/x /app/reward.txt; echo 1 > /app/x",
        f"chmod 000 {LOGS}; chmod 000 {TESTS}",
        "head -c 1G /dev/zero > fill; true",
        f"mkdir -p {TESTS}/test.sh/x",
        "for i in 1 2 3 4 5 6 7 8; do (while true; do true; done) & done",
    ],
)
def test_sabotage_of_the_verifier_earns_nothing(trial: TaskTrial, sabotage: str):
    trial.run(sabotage, 20)
    assert trial.verify(trial.task.steps[0], 20).rewards in ({"reward": 0.0}, {})
    assert trial.verify(trial.task.steps[0], 20).rewards in ({"reward": 0.0}, {})
