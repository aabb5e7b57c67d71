import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text
from pydantic import BaseModel, Field

from offbeat.envs import registry
from offbeat.envs.frozen_lake import FrozenLakeEnv
from tests.paths import ROOT


class Echo(gymnasium.Env[str, str]):
    """A user's env with keyword settings."""

    system_prompt = "Repeat."
    observation_space = Text(20)
    action_space = Text(20)

    def __init__(self, word: str, times: int = 1, *, split: str = "train") -> None:
        self.word, self.times, self.split = word, times, split

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self.word, {}


class PairConfig(BaseModel):
    words: tuple[str, ...] = Field(min_length=2)


class Pair(Echo):
    config_class = PairConfig


def anything(**settings: object) -> Echo:
    return Echo(" ".join(settings))


def no_env() -> str:
    return "not an env"


HERE = f"{__name__}:"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_a_built_in_env_is_made_with_its_settings():
    env = registry.make("frozen_lake", {"size": 6, "p": 1, "split": "any"})
    assert isinstance(env, FrozenLakeEnv)
    assert env.config.size == 6


def test_a_users_env_is_made_by_module_and_class():
    env = registry.make(HERE + "Echo", {"word": "hi"})
    assert isinstance(env, Echo)
    assert env.reset(seed=0)[0] == "hi"


def test_an_entry_point_names_an_env(monkeypatch: pytest.MonkeyPatch):
    point = EntryPoint("echo", HERE + "Echo", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINT_GROUP else [])
    assert registry.make("echo", {"word": "x"}).reset()[0] == "x"


@pytest.mark.parametrize(
    ("env_type", "settings", "expected"),
    [
        ("frozen_lake", {"siez": 4}, "env_config.siez: frozen_lake has no such setting, did you mean env_config.size?"),
        ("frozen_lake", {"p": "much"}, "env_config.p: Input should be a valid number, got 'much'"),
        ("frozen_lake", {"size": 1}, "env_config.size: Input should be greater than or equal to 2, got 1"),
        (
            "frozen_lake",
            {"action_pattern": "("},
            "env_config.action_pattern: action_pattern '(' is no regular expression",
        ),
        (
            "harbor",
            {"sandbox": {"timeout": 5}},
            "env_config.sandbox.timeout: harbor has no such setting, did you mean env_config.sandbox.timeout_s?; it has ",
        ),
        (
            "pettingzoo",
            {"id": "classic/tictactoe-v3", "opponents": {"player_2": {"pth": "random"}}},
            "env_config.opponents.player_2.pth: pettingzoo has no such setting, did you mean "
            "env_config.opponents.player_2.path?; it has path, args",
        ),
        ("frozen_like", {}, "env_type: no env named 'frozen_like', did you mean frozen_lake?"),
        (
            HERE + "Echo",
            {"word": "a", "tims": 2},
            "env_config.tims: " + HERE + "Echo has no such setting, did you mean env_config.times?",
        ),
        (HERE + "Echo", {}, "env_config.word: required by " + HERE + "Echo"),
        (HERE + "Ecko", {}, "has no attribute 'Ecko'"),
        ("no.such.module:Env", {}, "No module named 'no'"),
        (HERE + "HERE", {}, "is a str, not a class or function"),
        (":", {}, "env_type ':'"),
    ],
)
def test_invalid_settings_are_named_up_front(env_type: str, settings: dict[str, Any], expected: str):
    problems = registry.check_env_config(env_type, settings)
    assert len(problems) == 1
    assert expected in problems[0]
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        registry.make(env_type, settings)
    assert str(refused.value) == problems[0]


def test_all_wrong_settings_are_reported_together():
    assert len(registry.check_env_config("frozen_lake", {"siez": 4, "p": 2.0})) == 2


def test_a_list_whose_only_item_is_wrong_is_not_called_empty():
    """Pydantic counts the valid items alone, and says that there are too few, too."""
    settings = {"env_type": "frozen_lake", "tools": [{"tool_id": "search"}]}
    (problem,) = registry.check_env_config("tools", settings)
    assert problem.startswith("env_config.tools.0: set either corpus or url")
    (problem,) = registry.check_env_config("tools", {**settings, "tools": []})
    assert problem.startswith("env_config.tools: Tuple should have at least 1 item")
    (problem,) = registry.check_env_config(HERE + "Pair", {"words": ["a"]})
    assert problem.startswith("env_config.words: Tuple should have at least 2 items")


def test_valid_settings_have_no_problem():
    assert registry.check_env_config("frozen_lake", {"size": 4, "p": 0.7, "is_slippery": False}) == []
    assert registry.check_env_config(HERE + "Echo", {"word": "a"}) == []
    assert registry.check_env_config(HERE + "anything", {"whatever": 1}) == []


def test_a_factory_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"makes a str, not a gymnasium\.Env"):
        registry.make(HERE + "no_env", {})


def test_evaluation_uses_the_held_out_split_unless_the_tag_sets_one():
    assert registry.held_out_config("frozen_lake", {"size": 5}) == {"size": 5, "split": "held_out"}
    assert registry.held_out_config("frozen_lake", {"split": "any"}) == {"split": "any"}
    assert registry.held_out_config(HERE + "Echo", {"word": "a"}) == {"word": "a", "split": "held_out"}
    assert registry.held_out_config(HERE + "anything", {}) == {}


def test_distinct_seeds_bring_distinct_maps():
    settings = {"split": "held_out"}
    seeds = registry.distinct_seeds(256, 1000, "frozen_lake", settings)
    env = registry.make("frozen_lake", settings)
    assert len({env.unwrapped.task_id(seed) for seed in seeds}) == 256
    assert seeds == sorted(seeds)
    assert seeds[0] == 1000
    assert registry.distinct_seeds(64, 1000, "frozen_lake", settings) == seeds[:64]


def test_exhausted_tasks_repeat_in_order():
    seeds = registry.distinct_seeds(40, 0, "frozen_lake", {"size": 2, "split": "any"})
    distinct = len(set(seeds))
    assert 1 < distinct < 10
    assert seeds[distinct : 2 * distinct] == seeds[:distinct]


def test_an_env_without_task_id_gets_consecutive_seeds():
    assert registry.distinct_seeds(3, 7, HERE + "Echo", {"word": "a"}) == [7, 8, 9]


def test_the_registry_imports_no_heavy_library():
    program = (
        "import sys, offbeat.envs.registry as r; r.make('frozen_lake', {}); print({'torch', 'ray'} & set(sys.modules))"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("env_type", sorted(registry.BUILT_IN))
def test_a_built_in_env_is_described_in_its_own_words(env_type: str):
    assert registry.describe(env_type)
    assert registry.describe(env_type) != (gymnasium.Env.__doc__ or "").partition("\n")[0]
