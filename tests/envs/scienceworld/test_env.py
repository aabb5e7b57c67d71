"""ScienceWorld itself, in Java; skipped without it or the package."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from offbeat.envs.scienceworld import ScienceWorldEnv
from offbeat.envs.scienceworld.simulator import Jvm, Simulator, SimulatorError
from tests.waiting import wait_until_sync

pytest.importorskip("scienceworld")
pytestmark = [pytest.mark.skipif(shutil.which("java") is None, reason="no Java"), pytest.mark.slow]

TASK = "find-living-thing"
EASY = {"tasks": [TASK], "simplifications": ["easy"]}


@pytest.fixture(scope="module", autouse=True)
def one_jvm() -> Iterator[Jvm]:
    """Keep the process between the tests, which takes them seconds to start."""
    simulator = Simulator.start()
    yield simulator.jvm
    simulator.close()
    assert not psutil.pid_exists(simulator.jvm.pid)


@pytest.fixture
def make() -> Iterator[Any]:
    envs: list[ScienceWorldEnv] = []

    def create(**settings: Any) -> ScienceWorldEnv:
        env = registry.make("scienceworld", {**EASY, **settings}).unwrapped
        assert isinstance(env, ScienceWorldEnv)
        envs.append(env)
        return env

    yield create
    for env in envs:
        env.close()
        env.close()


def test_it_meets_the_contract():
    report = check_contract("scienceworld", EASY, num_seeds=2, max_turns=2)
    assert report.findings == []
    assert report.num_turns > 10


def test_the_packages_solution_earns_its_score(make: Any):
    simulator = Simulator.start()
    simulator._interface.load(TASK, 7, "easy", True)
    solution = list(simulator._interface.getGoldActionSequence())
    env = make(variations=[7, 7])
    observation, _ = env.reset(seed=0)
    assert observation == f"{simulator.task_description()}\n\n{simulator.step('look around')[0]}"
    total, over, info = 0.0, False, {}
    for action in solution:
        shown, score, is_over = simulator.step(action)
        observation, reward, over, truncated, info = env.step(action)
        total += reward
        assert (observation, over, truncated, info["score"]) == (shown, is_over, False, score)
        assert total == pytest.approx(score)
    assert (info["score"], info["success"], over) == (1.0, True, True)
    simulator.close()


def test_a_failure_ends_the_episode_at_its_reward(make: Any):
    for failure_reward in (0.0, -1.0):
        env = make(failure_reward=failure_reward, format_penalty=-0.125, action_pattern="<answer>(.*?)</answer>")
        env.reset(seed=1)
        _, first, over, _, info = env.step("<answer>look   around\n</answer>")
        assert (over, info["action_is_valid"], first) == (False, True, info["score"])
        _, penalty, over, _, info = env.step("look around")
        assert (penalty, over, info["action_is_valid"], info["format_penalty"]) == (-0.125, False, False, -0.125)
        _, last, over, truncated, info = env.step("<answer>focus on agent</answer>")
        assert (over, truncated, info["success"], info["score"]) == (True, False, False, -1.0)
        assert first + last == pytest.approx(failure_reward)


def test_turns_are_limited_and_valid_actions_shown(make: Any):
    env = make(max_steps=2, show_actions=True)
    observation, _ = env.reset(seed=2)
    assert "\n\nActions: " in observation
    actions = observation.partition("\n\nActions: ")[2].split(", ")
    assert {"look around", "inventory", "teleport to kitchen"} <= set(actions)
    assert env.step("teleport to kitchen")[2:4] == (False, False)
    assert env.step("look around")[2:4] == (False, True)
    assert "teleport to LOC" in env.system_prompt
    assert "teleport" not in make(simplifications=[]).system_prompt


def test_splits_are_the_packages_and_ids_name_tasks(make: Any):
    """Of 300 variations, half train and a quarter each dev and test; `1-1` is `boil`."""
    envs = {split: make(tasks=["4-1"], split=split) for split in ("train", "held_out", "test")}
    ids = {split: {env.task_id(seed) for seed in range(200)} for split, env in envs.items()}
    numbers = {split: {int(each.removeprefix("find-living-thing ")) for each in of} for split, of in ids.items()}
    assert numbers["train"] <= set(range(150))
    assert numbers["held_out"] <= set(range(150, 225))
    assert numbers["test"] <= set(range(225, 300))
    assert min(map(len, numbers.values())) > 60
    third = make(tasks=["1-1", TASK], variations=[3, 3])
    assert {third.task_id(seed) for seed in range(20)} == {"boil 3", f"{TASK} 3"}
    with pytest.raises(
        ValueError, match=r"variations: \[29, 40\] has none of boil's in split 'train', which are 0 to 13"
    ):
        make(tasks=["boil"], variations=[29, 40]).reset(seed=0)


def test_envs_of_a_process_share_java_without_sharing_state(make: Any, one_jvm: Jvm):
    """Interleaved episodes, of animals that wander, equal those played alone."""

    def play(*envs: ScienceWorldEnv) -> list[list[object]]:
        shown: list[list[object]] = [[env.reset(seed=5)[0]] for env in envs]
        for action in ("teleport to outside", "wait1", "look around", "wait1", "look around"):
            for env, of in zip(envs, shown, strict=True):
                of.append(env.step(action)[:2])
        return shown

    first, second = make(), make(simplifications=["teleportAction"])
    alone = [*play(first), *play(second)]
    assert play(first, second) == alone
    assert first._simulator.jvm is second._simulator.jvm is one_jvm


def test_java_ends_with_its_process_and_its_death_is_named():
    """Killed, the process closes no env; another one notices that its Java has been killed, and starts a new one."""
    program = (
        "import os, signal, sys\n"
        "from offbeat.envs.scienceworld.simulator import Simulator, SimulatorError\n"
        "simulator = Simulator.start()\n"
        "os.kill(simulator.jvm.pid, signal.SIGKILL)\n"
        "try:\n"
        "    simulator.step('look around')\n"
        "except SimulatorError as error:\n"
        "    print(error)\n"
        "simulator.close()\n"
        "print(Simulator.start().jvm.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == (
            "ScienceWorld's Java process ended with exit code -9 in step('look around')\n"
        )
        java = psutil.Process(int(process.stdout.readline()))
        assert java.name() == "java"
        process.kill()
    wait_until_sync(lambda: not java.is_running())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["boill"]}, "tasks: ScienceWorld has no 'boill'; its tasks are boil, change"),
        ({"simplifications": ["easy", "openDoors"]}, "easy stands for a set of simplifications"),
        ({"simplifications": ["noDoors"]}, "env_config.simplifications.0: Input should be 'easy', 'teleportAction'"),
        ({"tasks": ["3-1"], "simplifications": ["noElectricalAction"]}, "power-component needs electrical actions"),
        ({"failure_reward": -2.0}, "failure_reward"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        registry.make("scienceworld", settings)


def test_missing_java_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ValueError, match="needs Java 8 or newer, and JAVA_HOME=/nowhere has no bin/java: install one"):
        registry.make("scienceworld", {})
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="no `java` is on PATH"):
        registry.make("scienceworld", {})


def test_java_that_does_not_start_is_quoted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx1")
    with pytest.raises(SimulatorError, match=r"java did not start: (?s:.*)Too small maximum heap"):
        Jvm(shutil.which("java") or "")
