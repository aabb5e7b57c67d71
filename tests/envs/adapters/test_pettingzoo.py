"""PettingZoo's own games as text envs, against the games themselves."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pettingzoo import make
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy

TICTACTOE, CONNECT_FOUR = "classic/tictactoe-v3", "classic/connect_four-v3"
ANSWERS: list[tuple[str, str]] = []


class FirstLegal:
    """The first free square, remembering what it was shown."""

    def __init__(self, note: str) -> None:
        self._note = note

    def __call__(self, system_prompt: str, observation: str, rng: np.random.Generator) -> str:
        del rng
        ANSWERS.append((self._note, system_prompt))
        return str("".join(observation.split()[1:]).index("."))


@pytest.mark.parametrize("game", [TICTACTOE, CONNECT_FOUR])
@pytest.mark.parametrize("opponents", [{}, {"player_1": {}}])
def test_a_game_meets_the_contract(game: str, opponents: dict[str, Any]) -> None:
    report = check_contract("pettingzoo", {"id": game, "opponents": opponents})
    assert report.problems == []
    assert report.num_turns > 50


@pytest.mark.parametrize("game", [TICTACTOE, CONNECT_FOUR, "pettingzoo.classic.tictactoe.tictactoe:env"])
def test_seats_rewards_and_ends_are_the_games_own(game: str) -> None:
    env = registry.make("pettingzoo", {"id": game})
    own = make("aec", TICTACTOE if ":" in game else game)
    rng = np.random.default_rng(0)
    for seed in range(20):
        _, info = env.reset(seed=seed)
        own.reset(seed=seed)
        totals = dict.fromkeys(own.possible_agents, 0.0)
        for agent in own.agent_iter():
            observation, reward, terminated, truncated, _ = own.last()
            totals[agent] += reward
            if terminated or truncated:
                own.step(None)
                continue
            assert info["seat"] == agent
            answer = env.unwrapped.random_answer(rng)
            assert observation["action_mask"][int(answer)]
            own.step(int(answer))
            _, _, over, _, info = env.step(answer)
            assert over == all(own.terminations.values())
            assert info["seats"][agent]["action_is_valid"] is True
        assert {name: values["reward"] for name, values in info["seats"].items()} == totals
        assert {name: values["success"] for name, values in info["seats"].items()} == {
            name: total > 0 for name, total in totals.items()
        }


@pytest.mark.parametrize("opponents", [{}, {"player_1": {}}])
def test_a_game_that_a_limit_of_turns_ends_is_truncated(opponents: dict[str, Any]) -> None:
    env = registry.make("pettingzoo", {"id": "classic/rps-v2", "kwargs": {"max_cycles": 3}, "opponents": opponents})
    env.reset(seed=0)
    ends = [env.step("0")[2:4] for _ in range(3 if opponents else 6)]
    assert ends == [*[(False, False)] * (len(ends) - 1), (False, True)]
    env.reset(seed=0)
    assert env.step("no move")[2:4] == (True, False)


def test_a_game_with_images_meets_the_contract() -> None:
    assert check_contract("pettingzoo", {"id": TICTACTOE, "render_mode": "rgb_array"}, num_seeds=2).problems == []


def test_an_illegal_move_and_no_move_end_the_game_by_its_rules() -> None:
    """As `TerminateIllegalWrapper` has it: -1 for the mover, 0 for the others."""
    env = registry.make("pettingzoo", {"id": TICTACTOE, "action_pattern": "<answer>(.*?)</answer>"})
    for answer in ("<answer>4</answer>", "<answer>9</answer>", "4"):
        env.reset(seed=1)
        assert env.step("<answer> 4 </answer>")[:3] == ("player_2\n. . .\n. O .\n. . .", 0.0, False)
        _, reward, over, _, info = env.step(answer)
        assert (reward, over, "seat" in info) == (-1.0, True, False)
        assert info["seats"] == {
            "player_1": {"reward": 0.0, "success": False},
            "player_2": {"reward": -1.0, "success": False, "action_is_valid": False},
        }


def test_with_opponents_on_the_other_seats_it_is_an_ordinary_env() -> None:
    ANSWERS.clear()
    opponents = {"player_1": {"path": f"{__name__}:FirstLegal", "args": {"note": "x"}}}
    env = registry.make("pettingzoo", {"id": TICTACTOE, "opponents": opponents, "system_prompt": "Play"})
    assert env.reset(seed=1) == ("player_2\nO . .\n. . .\n. . .", {})
    assert env.step("3")[:4] == ("player_2\nO O .\nX . .\n. . .", 0.0, False, False)
    assert env.step("2")[:4] == ("player_2\nO O X\nX O .\n. . .", 0.0, False, False)
    # it takes the last squares in order, and wins with the diagonal
    end = env.step("5")
    assert end[:4] == ("player_2\nO O X\nX O X\nO . .", 0.0, False, False)
    assert env.step("8") == ("", 1.0, True, False, {"success": True, "action_is_valid": True})
    assert set(ANSWERS) == {("x", "Play")}


def test_a_random_opponent_repeats_itself_for_a_seed_alone() -> None:
    env = registry.make("pettingzoo", {"id": CONNECT_FOUR, "opponents": {"player_0": {}}})
    first = [env.reset(seed=seed)[0] for seed in range(12)]
    assert first == [env.reset(seed=seed)[0] for seed in range(12)]
    assert len(set(first)) > 3


def test_a_frame_is_drawn_after_each_move() -> None:
    settings = {"id": TICTACTOE, "render_mode": "rgb_array", "kwargs": {"screen_height": 120}}
    env = registry.make("pettingzoo", settings)
    env.reset(seed=1)
    before = env.render()
    env.step("4")
    after = env.render()
    assert isinstance(after, np.ndarray)
    assert (after.shape, after.dtype) == ((120, 120, 3), np.uint8)
    assert (after != before).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "classic/tictactoe-v9"}, "PettingZoo's game 'classic/tictactoe-v9'"),
        ({"id": "no.module:env"}, "ModuleNotFoundError: No module named 'no'"),
        ({"opponents": {"player_9": {}}}, "has no seat 'player_9': it has player_1, player_2"),
        ({"opponents": {"player_1": {}, "player_2": {}}}, "opponents play every seat"),
        ({"opponents": {"player_1": {"path": "no.module:Class"}}}, "opponent of player_1, 'no.module:Class'"),
        ({"actions": ["a", "b"]}, "2 names of actions, but classic/tictactoe-v3 has 9"),
        ({"action_pattern": "("}, "no regular expression"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        registry.make("pettingzoo", {"id": TICTACTOE, **changes})


@pytest.fixture
def chat_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server that takes the first free square."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            received.append({**body, "path": self.path})
            square = "".join(body["messages"][1]["content"].split()[1:]).index(".")
            answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": f" {square}\n"}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", received
    server.shutdown()
    server.server_close()


def test_a_model_behind_a_url_is_an_opponent(chat_server: tuple[str, list[dict[str, Any]]]) -> None:
    url, received = chat_server
    args = {"base_url": url, "model": "m", "max_tokens": 4}
    opponents = {"player_2": {"path": "offbeat.deploy.agents.opponents:ChatOpponent", "args": args}}
    env = registry.make("pettingzoo", {"id": TICTACTOE, "opponents": opponents})
    env.reset(seed=1)
    assert env.step("4")[:2] == ("player_1\nO . .\n. X .\n. . .", 0.0)
    (request,) = received
    assert (request["path"], request["model"], request["max_tokens"]) == ("/v1/chat/completions", "m", 4)
    shown = [env.unwrapped.system_prompt, "player_2\n. . .\n. O .\n. . ."]
    assert [message["content"] for message in request["messages"]] == shown


def test_a_checkpoint_is_an_opponent(tmp_path: Path) -> None:
    """An untrained one, whose legal openings alone are games, repeats itself for a seed."""
    words = registry.make("pettingzoo", {"id": TICTACTOE}).unwrapped.words
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["unknown", *words])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)

    def openings(seat: str, **changes: Any) -> list[str]:
        args = {"path": str(tmp_path), "max_tokens": 1, **changes}
        opponents = {seat: {"path": "offbeat.deploy.agents.opponents:CheckpointOpponent", "args": args}}
        env = registry.make("pettingzoo", {"id": TICTACTOE, "opponents": opponents})
        return [env.reset(seed=seed)[0] for seed in range(6)]

    first = openings("player_1")
    assert first == openings("player_1")
    assert len(set(first)) > 1
    assert all("".join(board.split()[1:]).count("O") == 1 for board in first)
    with pytest.raises(ValueError, match="is neither a model folder"):
        openings("player_1", path=str(tmp_path / "none"))
