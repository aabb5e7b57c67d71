"""Tasks whose verifiers download: what has a network when, and that an outage is no verdict."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.envs.harbor import HarborConfig
from offbeat.envs.harbor.images import task_image
from offbeat.envs.harbor.obstacles import find_obstacles
from offbeat.envs.harbor.task import HarborTask, find_tasks
from offbeat.envs.harbor.trial import TaskTrial
from offbeat.envs.sandbox.network import NetworkError
from offbeat.envs.sandbox.shell import TASK_IMAGE, ShellLimits
from tests.envs.harbor.task_folder import TaskFolder, write_image_task
from tests.envs.sandbox.images import remove_images
from tests.envs.sandbox.networks import DOWNLOAD, Server, require_network, start_server

pytestmark = pytest.mark.slow
PROGRAMS = {
    "more connections than a process may have": """
for i in $(seq 1500); do echo x > /dev/udp/{address}/9999; done""",
    "more memory than the container has": """
for i in $(seq 9); do head -c 60M /dev/zero > /sandbox/$i; done; sleep 60""",
}
ANSWER = "of a network"
"""Of no other file of tests, which may remove its images meanwhile."""
VERIFIER = """
if [ -f program ]; then bash program; fi
{download}
if download {path} {name} && cmp -s "$ANSWER" /tests/expected; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for tasks, all of which have the same image, which exists."""
    require_network()
    folder = tmp_path_factory.mktemp("tasks")
    write_image_task(folder / "image", ANSWER)
    done = CliRunner().invoke(app, ["env", "tasks", str(folder), "--image", TASK_IMAGE, "--build"])
    assert done.exit_code == 0, done.output
    yield folder
    remove_images(task_image(find_tasks(folder)[0]))


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    del folder
    with start_server() as server:
        yield server


@pytest.fixture
def trial_of(folder: Path, server: Server) -> Iterator[Callable[..., TaskTrial]]:
    trials: list[TaskTrial] = []

    def start(network: str, toml: str = "", name: str = "/", **limits: int) -> TaskTrial:
        task = write_image_task(folder / f"task-{len(list(folder.iterdir()))}", ANSWER)
        task.write("task.toml", toml)
        task.write("tests/test.sh", VERIFIER.format(download=DOWNLOAD, path=server.path, name=name))
        limits = ShellLimits.model_validate(
            {
                **limits,
                "image": TASK_IMAGE,
                "network": network,
                "allowed_networks": (server.address,),
                "network_probe": (server.probe,),
            }
        )
        trials.append(TaskTrial(find_tasks(task.path)[0], limits))
        trials[-1].begin_step(trials[-1].task.steps[0])
        return trials[-1]

    yield start
    for trial in trials:
        trial.close()


def at_night(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


def downloads(trial: TaskTrial, server: Server) -> bool:
    return trial.run(f"{DOWNLOAD}download {server.path} /", 120).exit_code == 0


def test_a_verifier_downloads_and_the_policy_does_not(trial_of: Callable[..., TaskTrial], server: Server):
    trial = trial_of("verifier")
    assert not downloads(trial, server)
    trial.run("echo right > answer; (while sleep 0.05; do ls /sys/class/net > /testbed/seen; done) &", 20)
    verdict = trial.verify(trial.task.steps[0], 240)
    assert verdict == ({"reward": 1.0}, "")
    assert not downloads(trial, server)
    assert trial.run("cat seen", 20).output in ("lo\n", "")


@pytest.mark.parametrize(
    ("toml", "policy", "verifier"),
    [
        ("", True, 1.0),
        at_night("[environment]\nallow_internet = false\n", False, 0.0),
        at_night('[environment]\nnetwork_mode = "no-network"\n[verifier]\nnetwork_mode = "public"\n', False, 1.0),
    ],
)
def test_a_task_says_what_has_a_network(
    trial_of: Callable[..., TaskTrial], server: Server, toml: str, policy: bool, verifier: float
):
    trial = trial_of("task", toml)
    assert downloads(trial, server) == policy
    trial.run("echo right > answer", 120)
    assert trial.verify(trial.task.steps[0], 240).rewards == {"reward": verifier}


def test_an_outage_before_or_during_a_verifier_is_no_verdict(trial_of: Callable[..., TaskTrial], server: Server):
    """The request for /stop ends the server, after which nothing of it can be reached."""
    trial = trial_of("verifier", name="/stop")
    trial.run("echo wrong > answer", 120)
    with pytest.raises(NetworkError, match=f"network_probe: {server.probe} can't be reached from a container"):
        trial.verify(trial.task.steps[0], 240)
    server.process.wait()
    with pytest.raises(NetworkError, match="can't be reached"):
        trial.verify(trial.task.steps[0], 240)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_policys_program_makes_no_outage(trial_of: Callable[..., TaskTrial], server: Server, program: str):
    """The verifier runs it, with its network: it may spoil that, and its container, and earns nothing."""
    trial = trial_of("verifier", memory_mib=128, disk_mib=512)
    trial.run(f"cat > program <<'END'\n{PROGRAMS[program].format(address=server.address)}\nEND", 120)
    assert trial.verify(trial.task.steps[0], 120).rewards.get("reward", 0.0) == 0.0
    assert not Path("oom").exists()


def test_an_outage_is_an_error_of_the_env_and_no_reward(folder: Path, server: Server):
    settings = {"image": TASK_IMAGE, "network": "verifier", "allowed_networks": (server.address,)}
    env = TaskFolder.env(
        write_image_task(folder / "outage", ANSWER),
        tasks_dir=folder / "outage",
        sandbox={**settings, "network_probe": (server.probe,)},
    )
    env.reset(seed=0)
    server.process.kill()
    server.process.wait()
    with pytest.raises(NetworkError):
        env.step("submit")
    env.close()


@pytest.mark.nightly
def test_solutions_are_run_with_a_network(folder: Path):
    """Of the internet, or whatever answers here as pypi.org."""
    done = CliRunner().invoke(
        app, ["env", "tasks", str(folder / "image"), "--image", TASK_IMAGE, "--network", "verifier", "--solve"]
    )
    if "network_probe: pypi.org:443" in done.output:
        pytest.skip(done.output)
    assert "image: the solution earns 1, doing nothing 0" in done.output


@pytest.fixture
def task_of(tmp_path: Path) -> Callable[..., HarborTask]:
    def load(test: str, toml: str = "") -> HarborTask:
        task = TaskFolder(tmp_path / "task")
        task.write("task.toml", toml)
        task.write("tests/test.sh", test)
        for name in ("a", "b"):
            task.write(f"steps/{name}/instruction.md", "do it")
        return find_tasks(task.path)[0]

    return load


STEPS = '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("test", "toml", "image", "obstacle"),
    [
        ("apt-get install -y curl\ncurl x | sh\nuvx pytest\n", "", TASK_IMAGE, ""),
        ("curl x", "", "ubuntu", ""),
        (
            "apt-get update",
            "",
            "ubuntu",
            "calls apt-get (tests/test.sh): needs an image that it can change (image: task)",
        ),
        (
            "uvx x",
            "[environment]\nallow_internet = false\n",
            TASK_IMAGE,
            "needs the network, which task.toml rules out",
        ),
        ("apt-get update", STEPS, TASK_IMAGE, "before another step, where its packages count as changed programs"),
        ("pip install x", STEPS, TASK_IMAGE, ""),
        ("curl x", '[agent]\nnetwork_mode = "allowlist"\n', TASK_IMAGE, "network can't be limited to hosts"),
    ],
)
def test_a_verifier_that_downloads_is_an_obstacle_without_its_network_alone(
    task_of: Callable[..., HarborTask], test: str, toml: str, image: str, obstacle: str
):
    task = task_of(test, toml)
    assert "needs the network (sandbox: {image: task, network: verifier})" in find_obstacles(task, image=image)[-1]
    found = find_obstacles(task, image=image, has_network=True)
    assert bool(found) == bool(obstacle)
    assert obstacle in " ".join(found)


def test_harbors_own_trials_refuse_the_key():
    sandbox = {"image": "ubuntu", "network": "task"}
    with pytest.raises(ValueError, match=r"sandbox\.network has no effect with played_by: agent"):
        HarborConfig.model_validate({"played_by": "agent", "sandbox": sandbox})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--network", "verifier"), "--network verifier: needs --image, as the kernel sandbox has no network"),
        (("--image", "task", "--network", "host"), "--network 'host': expected none, verifier or task"),
        (("--image", "--x", "--network", "task"), "--image '--x': expected the name of an image"),
    ],
)
def test_a_network_that_can_not_be_is_refused(arguments: tuple[str, ...], says: str):
    done = CliRunner().invoke(app, ["env", "tasks", *arguments])
    assert done.exit_code == 2
    assert says in done.output
