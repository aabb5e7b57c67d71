"""Contract of each adapter over the real library; skipped if it is not installed."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import gymnasium
import numpy as np
import pytest

from offbeat.envs import registry
from offbeat.envs.adapters import reasoning_gym
from offbeat.envs.adapters.text import PrivateRandomState
from offbeat.envs.contract import check_contract
from offbeat.services.rollout.envs.runners import render_png
from offbeat.trainer.rendering.episodes import make_rendered, render_frame

CASES = [
    ("gymnasium", "gymnasium", {"id": "CartPole-v1", "actions": ["left", "right"]}),
    ("gymnasium", "gymnasium", {"id": "FrozenLake-v1", "observation": "ansi", "success_reward": 1.0}),
    ("gymnasium", "gymnasium", {"id": "Pendulum-v1"}),
    ("gymnasium", "gymnasium", {"id": "FrozenLake-v1", "action_pattern": "<answer>(.*?)</answer>"}),
    (
        "gymnasium",
        "gymnasium",
        {"id": "Blackjack-v1", "wrappers": [{"path": "gymnasium.wrappers:FlattenObservation"}]},
    ),
    ("reasoning_gym", "reasoning_gym", {"dataset": "chain_sum"}),
    ("textarena", "textarena", {"id": "GuessTheNumber-v0"}),
    ("gem", "gem", {"id": "game:Mastermind-v0-easy"}),
    ("gem", "gem", {"id": "game:FifteenPuzzle-v0-easy"}),
]


@pytest.mark.parametrize(("module", "env_type", "env_config"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_an_adapted_env_meets_the_contract(module: str, env_type: str, env_config: dict[str, object]):
    pytest.importorskip(module)
    report = check_contract(env_type, env_config, num_seeds=4)
    assert report.problems == []
    assert report.num_turns > 10
    assert "memory" not in {finding.rule for finding in report.findings}


def test_rewards_and_observations_equal_the_gymnasium_envs():
    env = registry.make("gymnasium", {"id": "CartPole-v1", "actions": ["left", "right"], "success_reward": 3.0})
    own = gymnasium.make("CartPole-v1")
    assert env.system_prompt == "Answer with one of left, right."
    shown, _ = own.reset(seed=5)
    assert env.reset(seed=5)[0] == " ".join(f"{value:.3f}" for value in shown)
    for turn, answer in enumerate(("Right", "left ", "right"), 1):
        observation, reward, *ends = own.step(1 if "ight" in answer else 0)[:4]
        result = env.step(answer)
        assert result[:2] == (" ".join(f"{value:.3f}" for value in observation), reward)
        assert list(result[2:4]) == ends
        assert result[4]["success"] is (turn == 3)


@pytest.mark.parametrize("answer", ["-1.5", "- 1.5", "\u22121.5", "\u20131.5", "torque: \u22121.5", "-1.5e0"])
def test_a_negative_number_is_executed_as_such(answer: str):
    env = registry.make("gymnasium", {"id": "Pendulum-v1"})
    env.reset(seed=0)
    assert env.step(answer)[4]["action_is_valid"]
    assert env.unwrapped._env.unwrapped.last_u == -1.5


@pytest.mark.parametrize("answer", ["about - 1.5", "- 1\n- 2"])
def test_an_ambiguous_sign_is_no_action(answer: str):
    env = registry.make("gymnasium", {"id": "Pendulum-v1"})
    env.reset(seed=0)
    assert not env.step(answer)[4]["action_is_valid"]


def test_an_invalid_answer_costs_the_penalty_without_a_step():
    env = registry.make("gymnasium", {"id": "CartPole-v1", "format_penalty": -0.5})
    before, _ = env.reset(seed=1)
    observation, reward, terminated, _, info = env.step("jump")
    assert (observation, reward, terminated, info["action_is_valid"]) == (before, -0.5, False, False)


def test_the_action_is_what_the_pattern_extracts():
    pattern = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
    env = registry.make(
        "gymnasium", {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "action_pattern": pattern}
    )
    own = gymnasium.make("FrozenLake-v1")
    env.reset(seed=1)
    own.reset(seed=1)
    for answer, action in (
        ("<think>up?</think> <answer> Right\n</answer>", 2),
        ("<think>\n</think><answer>down</answer>", 1),
    ):
        observation, reward, *_ = own.step(action)
        assert env.step(answer)[:2] == (str(observation), reward)
    assert env.step("right")[4]["action_is_valid"] is False
    number = registry.make("gymnasium", {"id": "Pendulum-v1", "action_pattern": "<answer>(.*?)</answer>"})
    number.reset(seed=1)
    assert number.step("2 ways: <answer>1.5</answer>")[4]["action_is_valid"] is True


def test_wrappers_are_applied_in_order():
    wrappers = [
        {"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": 2}},
        {"path": "gymnasium.wrappers:RecordEpisodeStatistics"},
    ]
    env = registry.make("gymnasium", {"id": "CartPole-v1", "wrappers": wrappers})
    env.reset(seed=1)
    assert env.step("0")[2:4] == (False, False)
    assert env.step("1")[2:4] == (False, True)
    discretized = [{"path": "gymnasium.wrappers:DiscretizeAction", "kwargs": {"bins": 3}}]
    torques = registry.make("gymnasium", {"id": "Pendulum-v1", "wrappers": discretized, "actions": ["a", "b", "c"]})
    torques.reset(seed=1)
    assert torques.step("b")[4]["action_is_valid"] is True


def test_numbers_of_a_box_are_parsed_and_clipped():
    env = registry.make("gymnasium", {"id": "Pendulum-v1"})
    own = gymnasium.make("Pendulum-v1")
    env.reset(seed=1)
    own.reset(seed=1)
    assert env.step("torque 9.5!")[1] == own.step(np.array([2.0], dtype=np.float32))[1]
    assert env.step("1 2")[4]["action_is_valid"] is False


@pytest.mark.parametrize(
    ("answer", "torque"),
    [(".5", 0.5), ("-.5", -0.5), ("+1", 1.0), ("1.", 1.0), ("1e-1", 0.1), ("1e+0", 1.0), ("[-1.5E+00]", -1.5)],
)
def test_numbers_of_a_box_may_have_any_decimal_form(answer: str, torque: float):
    env = registry.make("gymnasium", {"id": "Pendulum-v1"})
    own = gymnasium.make("Pendulum-v1")
    env.reset(seed=1)
    own.reset(seed=1)
    assert env.step(answer)[1] == own.step(np.array([torque], dtype=np.float32))[1]


@pytest.mark.filterwarnings("ignore")
def test_reasoning_gym_scores_answers_and_separates_splits():
    library = pytest.importorskip("reasoning_gym")
    env = registry.make("reasoning_gym", {"dataset": "chain_sum", "format_penalty": -0.1})
    question, _ = env.reset(seed=3)
    entry = library.create_dataset("chain_sum", seed=env.task_id(3), size=1)[0]
    assert question == entry["question"]
    assert env.step(f"so <answer>{entry['answer']}</answer>")[1] == 1.0
    assert env.step(entry["answer"])[1] == -0.1
    held_out = registry.make("reasoning_gym", {"dataset": "chain_sum", "split": "held_out"})
    assert not {env.task_id(seed) for seed in range(50)} & {held_out.task_id(seed) for seed in range(50)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dataset", ["n_queens", "countdown", "polynomial_multiplication", "intermediate_integration"])
def test_reasoning_gym_never_runs_an_answer_as_code(dataset: str, tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    env = registry.make("reasoning_gym", {"dataset": dataset})
    env.reset(seed=1)
    code = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    assert env.step(f"<answer>{code}</answer>")[1] < 0.1
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dataset", "answer"), [("countdown", "9**9**9**9"), ("coin_flip", "1e999999999")])
def test_an_answer_that_reasoning_gym_can_not_score_in_time_is_wrong(dataset: str, answer: str):
    pytest.importorskip("reasoning_gym")
    env = registry.make("reasoning_gym", {"dataset": dataset})
    env.reset(seed=1)
    assert env.step(f"<answer>{answer}</answer>")[1] == 0.0
    env.reset(seed=1)
    library = pytest.importorskip("reasoning_gym")
    right = library.create_dataset(dataset, seed=env.task_id(1), size=1)[0]["answer"]
    assert env.step(f"<answer>{right}</answer>")[1] == 1.0


@pytest.mark.filterwarnings("ignore")
def test_expensive_answers_of_threads_are_scored_within_the_step_timeout():
    pytest.importorskip("reasoning_gym")
    envs = [registry.make("reasoning_gym", {"dataset": "countdown"}) for _ in range(6)]
    for env in envs:
        env.reset(seed=1)
    envs[0].step("<answer>1</answer>")  # its process has imported the library
    start = time.monotonic()
    with ThreadPoolExecutor(len(envs)) as threads:
        steps = list(threads.map(lambda env: env.step("<answer>9**9**9**9</answer>"), envs))
    assert [step[1] for step in steps] == [0.0] * len(envs)
    assert time.monotonic() - start < 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dataset", "answer"), [("prime_factorization", "x"), ("boxnet", "[1, 2]"), ("game_of_life", '{"a": 1}')]
)
def test_an_answer_that_fails_reasoning_gyms_scorer_is_wrong(
    dataset: str, answer: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(reasoning_gym, "_warned_of", set())
    env = registry.make("reasoning_gym", {"dataset": dataset})
    for _ in range(2):
        env.reset(seed=1)
        assert env.step(f"<answer>{answer}</answer>")[1] == 0.0
    (record,) = (each for each in caplog.records if each.name == reasoning_gym.__name__)
    assert f"{dataset!r} failed" in record.message


def test_a_game_shows_only_new_log_lines_and_can_be_won():
    pytest.importorskip("textarena")
    env = registry.make("textarena", {"id": "GuessTheNumber-v0"})
    first, _ = env.reset(seed=3)
    assert "Guess The Number" in first
    second, reward, terminated, _, _ = env.step("[1]")
    assert (reward, terminated, "Guess The Number" in second) == (0.0, False, False)
    assert "[1]" not in second
    for thoughtful in ("<think>higher than 1</think> [2]", "no number\nat all"):
        observation, _, terminated, _, _ = env.step(thoughtful)
        assert not terminated
        assert observation.startswith("[GAME] "), observation
    low, high = 2, 20
    while not terminated:
        guess = (low + high) // 2
        observation, reward, terminated, _, info = env.step(f"[{guess}]")
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
    assert (reward, info["success"]) == (1.0, True)


@pytest.mark.parametrize(
    ("module", "env_type", "env_config", "message"),
    [
        ("gymnasium", "gymnasium", {"id": "Nope-v1"}, "doesn't exist"),
        ("gymnasium", "gymnasium", {"id": "FrozenLake-v1", "kwargs": {"map_name": "5x5"}}, "KeyError: '5x5'"),
        ("gymnasium", "gymnasium", {"id": "CartPole-v1", "actions": ["left"]}, "1 names of actions"),
        ("gymnasium", "gymnasium", {"id": "CartPole-v1", "action_pattern": "x"}, "has 0 groups"),
        ("gymnasium", "gymnasium", {"id": "CartPole-v1", "wrappers": [{"path": "gymnasium:Nope"}]}, "'gymnasium:Nope'"),
        ("gymnasium", "gymnasium", {"id": "CartPole-v1", "observation": "ansi"}, "no render mode 'ansi'; it has human"),
        ("gymnasium", "gymnasium", {"id": "CartPole-v1", "actions": ["Left", "left"]}, "'left' names two actions"),
        (
            "gymnasium",
            "gymnasium",
            {"id": "FrozenLake-v1", "observation": "ansi", "render_mode": "rgb_array"},
            "observation: ansi needs render_mode: ansi, got rgb_array",
        ),
        (
            "gymnasium",
            "gymnasium",
            {"id": "CartPole-v1", "wrappers": [{"path": "gymnasium.wrappers:TimeLimit", "kwargs": {"steps": 1}}]},
            "TimeLimit.*steps",
        ),
        ("gymnasium", "gymnasium", {"id": "CartPole-v1", "wrappers": [{"path": "builtins:id"}]}, "makes a int"),
        ("textarena", "textarena", {"id": "Nope-v0"}, r"textarena.make\('Nope-v0'\)"),
        ("reasoning_gym", "reasoning_gym", {"dataset": "nope"}, "not registered"),
    ],
)
def test_an_unknown_env_or_setting_is_named(module: str, env_type: str, env_config: dict[str, object], message: str):
    pytest.importorskip(module)
    with pytest.raises(ValueError, match=message):
        registry.make(env_type, env_config)


class Slide:
    """Env as GEM's games: the board is in the suffix."""

    num_closed = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        del seed
        return "Slide the tiles!", {"suffix": "Board: 2 . . 2\nEnter your move."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        info = {"prefix": "Turn 2.\n", "suffix": "Board: 4 . . .", "tiles": 1}
        return f"You moved {action}.\n", 0.0, False, False, info

    def close(self) -> None:
        Slide.num_closed += 1


def test_gems_boards_are_shown_and_its_envs_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gem", cast(ModuleType, SimpleNamespace(make=lambda _: Slide())))
    env = registry.make("gem", {"id": "game:Slide-v0"})
    assert env.reset(seed=1)[0] == "Slide the tiles!\nBoard: 2 . . 2\nEnter your move."
    observation, *_, info = env.step("left")
    assert observation == "Turn 2.\nYou moved left.\nBoard: 4 . . ."
    assert info == {"tiles": 1.0, "success": False}
    env.close()
    assert Slide.num_closed == 1


def test_a_gem_env_without_close_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gem", cast(ModuleType, SimpleNamespace(make=lambda _: object())))
    registry.make("gem", {"id": "game:Slide-v0"}).close()


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ValueError, match=r"gem is not installed: .* --no-deps gem-llm"):
        registry.make("gem", {"id": "x"})
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ValueError, match=r"textarena is not installed: uv pip install 'offbeat\[textarena\]'"):
        registry.make("textarena", {"id": "x"})


def test_private_random_state_leaves_global_generators_unchanged():
    first, second = PrivateRandomState(), PrivateRandomState()
    first.seed(1)
    second.seed(1)
    before = random.getstate()
    drawn = []
    for own in (first, second, first, second):
        with own():
            drawn.append((random.random(), np.random.random()))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert random.getstate() == before


def test_threads_with_private_random_states_draw_as_one_alone():
    """Each waits between its draws, while the others want theirs."""

    def draw(seed: int) -> list[float]:
        own = PrivateRandomState()
        own.seed(seed)
        with own():
            drawn = [random.random(), np.random.random()]
            time.sleep(0.005)
            return [*drawn, random.random(), np.random.random()]

    alone = [draw(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(draw, range(8))) == alone


class Heights(gymnasium.Env[int, np.ndarray]):
    """Takes two numbers of at least 5."""

    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Box(5, np.inf, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None):
        super().reset(seed=seed, options=options)
        return 0, {}

    def step(self, action: np.ndarray):
        return 0, float(action.sum()), False, False, {}


@pytest.mark.filterwarnings("ignore")
def test_random_answers_lie_in_a_box_that_is_bounded_on_one_side():
    gymnasium.register("Heights-v0", entry_point=Heights)
    try:
        assert check_contract("gymnasium", {"id": "Heights-v0"}, num_seeds=2).problems == []
        env = registry.make("gymnasium", {"id": "Heights-v0"})
        env.reset(seed=1)
        numbers = [float(number) for number in cast(Any, env).random_answer(np.random.default_rng(0)).split()]
        assert env.step("7 8")[1] == 15.0
        assert all(5 <= number <= 7 for number in numbers)
        assert not env.step("7 1e999")[4]["action_is_valid"]
    finally:
        gymnasium.registry.pop("Heights-v0")


@pytest.mark.parametrize("settings", [{"render_mode": "rgb_array"}, {"kwargs": {"render_mode": "rgb_array"}}])
def test_an_env_with_images_is_drawn(settings: dict[str, Any]):
    pytest.importorskip("pygame")
    env = registry.make("gymnasium", {"id": "CartPole-v1", **settings})
    env.reset(seed=1)
    assert render_png(env).startswith(b"\x89PNG")


def test_an_env_is_rendered_if_it_can_be():
    pytest.importorskip("pygame")
    for settings, is_drawn in (({"id": "CartPole-v1"}, True), ({"id": "FrozenLake-v1", "observation": "ansi"}, False)):
        env = make_rendered("gymnasium", settings)
        env.reset(seed=1)
        assert (render_frame(env) is not None) == is_drawn


class Dial(gymnasium.Env[np.ndarray, np.ndarray]):
    """Shows the byte that it is turned to."""

    observation_space = action_space = gymnasium.spaces.Box(0, 255, (1,), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None):
        super().reset(seed=seed, options=options)
        return np.zeros(1, np.uint8), {}

    def step(self, action: np.ndarray):
        return action, 0.0, False, False, {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("answer", "shown"), [("300", "255"), ("-1", "0"), ("7", "7"), ("1e999", "255")])
def test_out_of_range_numbers_of_an_integer_box_are_clipped(answer: str, shown: str):
    gymnasium.register("Dial-v0", entry_point=Dial)
    try:
        env = registry.make("gymnasium", {"id": "Dial-v0"})
        env.reset(seed=1)
        assert env.step(answer)[0] == shown
    finally:
        gymnasium.registry.pop("Dial-v0")
