import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from offbeat.envs.tools import env as tool_env
from offbeat.envs.tools.functions import Call, read_results, write_calls
from offbeat.services.rollout.envs.runners import do_reset, do_step, read_traits, render_png
from tests.envs.sandbox.needs import needs_sandbox

pytestmark = needs_sandbox


def lake(**settings: Any) -> Any:
    tools = settings.pop("tools", [{"tool_id": "python_code"}])
    env = registry.make("tools", {"env_type": "frozen_lake", "tools": tools, **settings})
    env.reset(seed=1)
    return env


def test_a_program_call_does_not_reach_the_wrapped_env():
    env = lake(tool_reward=-0.1, tool_success_reward=0.3)
    observation, reward, terminated, _, info = env.step("let me see\n```python\nprint(6 * 7)\n```")
    assert (observation, reward, terminated) == ("42", pytest.approx(0.2), False)
    assert (info["tool_use_counter"], info["tool_success_counter"]) == (1, 1)
    assert env.step("Right")[0] == "0 1 Left _ Down _ Right _ Up #"


def test_a_failing_program_returns_its_error():
    observation, reward, _, _, info = lake(tool_success_reward=1.0).step("```python\nprint('a')\n1 / 0\n```")
    assert observation == "a\nZeroDivisionError: division by zero"
    assert (reward, info["tool_use_counter"], info["tool_success_counter"]) == (0.0, 1, 0)


def test_calls_of_one_answer_share_their_time():
    tools = [{"tool_id": "python_code", "limits": {"timeout_s": 1.2}}]
    env = lake(tools=tools, function_calling="template", calls_timeout_s=2.0)
    observation, *_, info = env.step(write_calls("", [Call("python_code", {"code": "import time; time.sleep(9)"})] * 5))
    first, *others, last = read_results(observation, 5)
    assert (first, last) == ("out of time", tool_env.NO_TIME)
    assert set(others) <= {"out of time", tool_env.NO_TIME}
    assert (info["tool_use_counter"], info["tool_success_counter"]) == (5, 0)


def test_the_call_limit_is_per_episode():
    env = lake(max_tool_uses=1)
    call = "```python\nprint(1)\n```"
    assert env.step(call)[0] == "1"
    observation, _, _, _, info = env.step(call)
    assert "give the answer" in observation
    assert info["tool_use_counter"] == 0
    env.reset(seed=2)
    assert env.step(call)[0] == "1"


def test_a_corpus_is_searched(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    passages = ["Paris is the capital of France.", "Rome is the capital of Italy.", "Whales are mammals."]
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in passages))
    env = lake(tools=[{"tool_id": "search", "corpus": str(corpus), "top_k": 2}])
    assert env.step("<search>capital of Italy</search>")[0] == f"[1] {passages[1]}\n[2] {passages[0]}"
    assert env.step("<search>quantum</search>")[0] == "nothing was found"
    assert env.step("<search> </search>")[4]["tool_success_counter"] == 0
    assert "<search>words</search>" in env.system_prompt
    assert env.system_prompt.startswith("Walk P to G")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("missing.jsonl", {}, "^corpus: no such file"),
        ("corpus.pdf", {}, "^corpus: corpus.pdf is none of"),
        ("corpus.csv", {"text_key": "body"}, "^text_key: .* has no column 'body'; it has text"),
    ],
)
def test_an_unreadable_corpus_is_refused_before_the_first_call(
    name: str, settings: dict[str, str], message: str, tmp_path: Path
):
    for file in ("corpus.pdf", "corpus.csv"):
        (tmp_path / file).write_text("text\nParis\n")
    with pytest.raises(ValueError, match=message):
        lake(tools=[{"tool_id": "search", "corpus": str(tmp_path / name), **settings}])


def test_seats_of_a_wrapped_game_keep_their_turns_rewards_and_calls():
    pytest.importorskip("pettingzoo")
    game = {"env_type": "pettingzoo", "env_config": {"id": "classic/tictactoe-v3"}}
    rules = {"tools": [{"tool_id": "python_code"}], "max_tool_uses": 1, "tool_reward": -0.1, "tool_success_reward": 0.5}
    env: Any = registry.make("tools", {**game, **rules})
    assert read_traits(env).seats == ("player_1", "player_2")
    call = "```python\nprint(1)\n```"
    opening = do_reset(env, 0)
    seat, results = opening.seat, []
    for answer in ("0", call, "3", "1", "4", call, "2"):
        results.append((seat, do_step(env, answer)))
        seat = results[-1][1].seat
    first, second = results[1], results[5]
    assert (first[0], first[1].seat, first[1].seats) == ("player_2", "player_2", {"player_2": {"reward": 0.4}})
    assert (second[0], second[1].seat, second[1].seats) == ("player_1", "player_1", {"player_1": {"reward": 0.4}})
    last = results[-1][1]
    assert last.terminated
    assert (last.seats["player_1"]["reward"], last.seats["player_2"]["reward"]) == (1.0, -1.0)
    assert check_contract("tools", {**game, **rules}, num_seeds=2).problems == []


def test_the_wrapped_env_is_drawn():
    env = lake(env_config={"render_mode": "rgb_array"})
    assert render_png(env).startswith(b"\x89PNG")
    assert "rgb_array" in env.metadata["render_modes"]


def test_functions_of_the_wrapped_env_are_refused():
    tools = [{"tool_id": "python_code"}]
    with pytest.raises(ValueError, match=r"tools: harbor has functions of its own.*function_calling: prompt"):
        registry.make("tools", {"env_type": "harbor", "env_config": {"function_calling": "template"}, "tools": tools})


def test_the_split_is_passed_to_the_wrapped_env():
    settings = {"env_type": "frozen_lake", "tools": [{"tool_id": "python_code"}]}
    held_out = registry.make("tools", registry.held_out_config("tools", settings))
    own = registry.make("frozen_lake", {"split": "held_out"})
    assert held_out.reset(seed=3)[0] == own.reset(seed=3)[0]
    assert held_out.task_id(3) == own.task_id(3)


def test_invalid_settings_are_refused():
    for settings, message in (
        ({"env_type": "frozen_lake", "tools": []}, "at least 1 item"),
        ({"env_type": "frozen_lake", "tools": [{"tool_id": "hammer"}]}, "'hammer'"),
        ({"env_type": "frozen_lake", "tools": [{"tool_id": "python_code", "pattern": "x"}]}, "has 0 groups"),
    ):
        assert message in "; ".join(registry.check_env_config("tools", settings))
    with pytest.raises(ValueError, match="did you mean frozen_lake"):
        registry.make("tools", {"env_type": "frozen_lak", "tools": [{"tool_id": "python_code"}]})


@pytest.mark.parametrize(
    "program",
    [
        "",
        "pass",
        "# print(42)",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "print()",
        "print(' ' * 9)",
        "print('42')\nraise SystemExit(1)",
        "import sys\nprint('42', file=sys.stderr)",
        "quit()",
    ],
)
def test_a_program_that_returns_nothing_earns_no_success_reward(program: str):
    _, reward, _, _, info = lake(tool_success_reward=1.0).step(f"```python\n{program}\n```")
    assert (reward, info["tool_use_counter"]) == (0.0, 1)


def test_the_success_reward_is_paid_once_per_episode():
    env = lake(tool_success_reward=1.0, max_tool_uses=10)
    calls = ["pass", "print(1)", "print(2)", "print(2)"]
    assert [env.step(f"```python\n{call}\n```")[1] for call in calls] == [0.0, 1.0, 0.0, 0.0]
    env.reset(seed=2)
    assert env.step("```python\nprint(1)\n```")[1] == 1.0


def test_several_calls_of_one_answer_earn_one_success_reward():
    env = lake(tool_success_reward=1.0, function_calling="template")
    call = Call("python_code", {"code": "print(1)"})
    _, reward, _, _, info = env.step(write_calls("", [call, call, call]))
    assert (reward, info["tool_success_counter"]) == (1.0, 3)
