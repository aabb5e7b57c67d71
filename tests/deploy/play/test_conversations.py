"""Files of `offbeat rollout` are data sets for `datasets` and TRL."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.play.conversations import make_pairs
from offbeat.deploy.play.parquet import read_parquet
from offbeat.services.messages.types import Trajectory
from tests.copying import replace
from tests.fakes import make_trajectory

pytestmark = pytest.mark.slow


def rollout(folder: Path, out: Path, *options: str) -> None:
    command = ["rollout", str(folder / "run.yaml"), "--agent", "random", "--episodes", "4", "--out", str(out), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output


def load(out: Path, cache: Path) -> Any:
    from datasets import load_dataset

    return load_dataset(
        out.suffix.replace(".jsonl", ".json")[1:], data_files=str(out), split="train", cache_dir=str(cache)
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_episode_is_a_conversation_for_trl(folder: Path, tmp_path: Path, suffix: str):
    from trl.data_utils import is_conversational, maybe_apply_chat_template

    out = tmp_path / f"episodes{suffix}"
    rollout(folder, out)
    data, tokenizer = load(out, tmp_path), AutoTokenizer.from_pretrained(folder / "policy")
    assert len(data) == 4
    for row in data:
        assert is_conversational(row)
        roles = [message["role"] for message in row["messages"]]
        assert roles[0] == "system"
        assert roles[1:] == ["user", "assistant"] * (len(roles) // 2)
        text = maybe_apply_chat_template({"messages": row["messages"]}, tokenizer)["text"]
        assert text.count("<|im_start|>") == len(roles)
        assert isinstance(row["reward"], float)


def test_an_answer_is_a_prompt_and_its_completion(folder: Path, tmp_path: Path):
    from trl.data_utils import is_conversational, maybe_apply_chat_template

    episodes, answers = tmp_path / "episodes.jsonl", tmp_path / "answers.jsonl"
    rollout(folder, episodes)
    rollout(folder, answers, "--per", "answer")
    data, tokenizer = load(answers, tmp_path), AutoTokenizer.from_pretrained(folder / "policy")
    rows = iter(data)
    for episode in load(episodes, tmp_path):
        said = [i for i, message in enumerate(episode["messages"]) if message["role"] == "assistant"]
        for turn, i in enumerate(said):
            row = next(rows)
            assert is_conversational(row)
            assert (row["prompt"], row["completion"]) == (episode["messages"][:i], [episode["messages"][i]])
            assert (row["turn"], row["seed"], row["reward"]) == (turn, episode["seed"], episode["reward"])
            filled = maybe_apply_chat_template({"prompt": row["prompt"], "completion": row["completion"]}, tokenizer)
            assert filled["completion"].startswith(row["completion"][0]["content"])
    assert next(rows, None) is None


def test_a_pair_is_a_groups_best_episode_against_its_worst(folder: Path, tmp_path: Path):
    from trl.data_utils import is_conversational, maybe_apply_chat_template, maybe_extract_prompt

    episodes, pairs = tmp_path / "episodes.jsonl", tmp_path / "pairs.jsonl"
    options = ("--episodes", "24", "--group-size", "4", "--seed", "3")
    rollout(folder, episodes, *options)
    rollout(folder, pairs, "--per", "pair", *options)
    groups: dict[int, list[Any]] = {}
    for row in load(episodes, tmp_path):
        groups.setdefault(row["group"], []).append(row)
    differing = {n: rows for n, rows in groups.items() if len({row["reward"] for row in rows}) > 1}
    data, tokenizer = load(pairs, tmp_path), AutoTokenizer.from_pretrained(folder / "policy")
    assert [row["group"] for row in data] == list(differing)
    assert 0 < len(differing) < len(groups)
    for row in data:
        rewards = [each["reward"] for each in differing[row["group"]]]
        assert (row["chosen_reward"], row["rejected_reward"]) == (max(rewards), min(rewards))
        assert is_conversational(row)
        filled = maybe_apply_chat_template(maybe_extract_prompt(dict(row)), tokenizer)
        assert filled["chosen"] != filled["rejected"]


SELF_PLAY = "{env_type: pettingzoo, max_steps: 9, max_tokens_per_step: 8, env_config: {id: classic/tictactoe-v3}}"
STEPWISE = (
    "{env_type: frozen_lake, max_steps: 3, max_tokens_per_step: 8, env_manager_cls: StepEnvManager, history_length: 1, "
    "agent_template: '{history} now {observation}'}"
)


def collect(tmp_path: Path, env: str, *options: str, suffix: str = ".jsonl") -> list[dict[str, Any]]:
    run, out = tmp_path / "run.yaml", tmp_path / f"out{suffix}"
    run.write_text(
        f"exp_name: own\noutput_dir: {tmp_path / 'runs'}\ncustom_envs: {{G: {env}}}\n"
        "train_env_manager: {num_env_groups: 4, group_size: 2}\nrollout_batch_size: 8\nmax_steps: 10\n"
    )
    command = ["rollout", str(run), "--agent", "random", "--episodes", "8", "--out", str(out), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert ("for training data write a .jsonl" in done.output) == (suffix == ".parquet")
    return [json.loads(line) for line in out.read_text().splitlines()] if suffix == ".jsonl" else []


def test_a_game_against_itself_is_a_conversation_per_seat(tmp_path: Path):
    pytest.importorskip("pettingzoo")
    rows = collect(tmp_path, SELF_PLAY)
    assert [row["seat"] for row in rows] == ["player_1", "player_2"] * 8
    for row in rows:
        shown = [each["content"] for each in row["messages"] if each["role"] == "user"]
        assert all(text.startswith(row["seat"]) for text in shown)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["reward"] + second["reward"] == 0.0
        assert first["success"] == (first["reward"] == 1.0)
    assert {row["reward"] for row in rows} >= {1.0, -1.0}
    answers = collect(tmp_path, SELF_PLAY, "--per", "answer")
    for row in answers:
        assert all(each["content"].startswith(row["seat"]) for each in row["prompt"] if each["role"] == "user")
        assert len(row["prompt"]) == 2 * row["turn"] + 2
    pairs = collect(tmp_path, SELF_PLAY, "--per", "pair", "--group-size", "8")
    assert {row["seat"] for row in pairs} >= {"player_1"}
    for row in pairs:
        assert row["chosen"][:2] == row["rejected"][:2]
        assert row["chosen_reward"] > row["rejected_reward"]
    collect(tmp_path, SELF_PLAY, suffix=".parquet")


def test_a_step_wise_prompt_is_that_of_its_turn(tmp_path: Path):
    rows = collect(tmp_path, STEPWISE, "--per", "answer")
    assert {row["turn"] for row in rows} == {0, 1, 2}
    for row, following in pairwise(rows):
        assert [each["role"] for each in row["prompt"]] == ["system", "user"]
        if following["turn"] == row["turn"] + 1:
            now = row["prompt"][1]["content"].partition(" now ")[2]
            assert following["prompt"][1]["content"].startswith(f"{now}\n{row['completion'][0]['content']} now ")
    episodes = collect(tmp_path, STEPWISE)
    assert [(row["messages"], row["turn"]) for row in episodes] == [
        (row["prompt"] + row["completion"], row["turn"]) for row in rows
    ]
    collect(tmp_path, STEPWISE, suffix=".parquet")
    command = ["rollout", str(tmp_path / "run.yaml"), "--agent", "random", "--out", str(tmp_path / "p.jsonl")]
    done = CliRunner().invoke(app, [*command, "--per", "pair", "--episodes", "8", "--group-size", "4"])
    assert done.exit_code == 2
    assert "G has a context per turn" in done.output


def test_an_agents_conversations_are_not_taken_from_the_envs(tmp_path: Path):
    """The agent may ask the policy anything; that is recorded as tokens."""
    run, agent = tmp_path / "run.yaml", "offbeat.deploy.agents.walker:play"
    env = "env_type: frozen_lake, max_steps: 3, max_tokens_per_step: 8"
    run.write_text(
        f"exp_name: own\noutput_dir: {tmp_path / 'runs'}\n"
        f"custom_envs: {{G: {{{env}, agent_runner: {{path: '{agent}'}}}}, H: {{{env}}}}}\n"
        "train_env_manager: {num_env_groups: 4, group_size: 2, tags: [G]}\nval_env_manager: {tags: [H]}\n"
        "rollout_batch_size: 8\nmax_steps: 10\n"
    )

    def rollout(split: str, suffix: str) -> Result:
        out = str(tmp_path / f"r{suffix}")
        command = ["rollout", str(run), "--agent", "random", "--episodes", "2", "--split", split, "--out", out]
        return CliRunner().invoke(app, command)

    refused, written = rollout("train", ".jsonl"), rollout("train", ".parquet")
    assert (refused.exit_code, "G's agent" in refused.output) == (2, True)
    assert (written.exit_code, "`messages` of G are the env's" in written.output) == (0, True), written.output
    for suffix in (".jsonl", ".parquet"):
        of_an_env = rollout("held_out", suffix)
        assert (of_an_env.exit_code, "of G" in of_an_env.output) == (0, False), of_an_env.output


def test_rewards_decide_a_pair_and_equal_ones_make_none():
    def episode(group: int, index: int, reward: float) -> Trajectory:
        return make_trajectory(group, index, reward=reward, text=("rules", "where", f"answer {index}"))

    members = [(0, 0, 0.5), (0, 1, 1.0), (0, 2, 1.0), (0, 3, -1.0), (1, 0, 1.0), (1, 1, 1.0)]
    trajectories = [replace(episode(*member), group_id=str(member[0])) for member in members]
    (pair,) = make_pairs(trajectories)
    assert (pair["chosen"][-1], pair["rejected"][-1]) == (
        {"role": "assistant", "content": "answer 1"},
        {"role": "assistant", "content": "answer 3"},
    )
    assert (pair["chosen_reward"], pair["rejected_reward"], pair["group"]) == (1.0, -1.0, 0)


def test_a_parquet_file_with_texts_instead_of_messages_is_read(folder: Path, tmp_path: Path):
    """As builds before 0.2 wrote it."""
    out = tmp_path / "r.parquet"
    rollout(folder, out)
    table, today = parquet.read_table(out), read_parquet(out)
    texts = [[message["content"] for message in episode.messages] for episode in today]
    column = pa.array(texts, type=pa.list_(pa.string()))
    parquet.write_table(table.set_column(table.column_names.index("messages"), "messages", column), out)
    assert read_parquet(out) == today


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--out", "r.csv"), "must end in .parquet or .jsonl"),
        (("--per", "answer"), "needs a .jsonl file"),
        (("--per", "pair", "--out", "r.jsonl"), "set --group-size to at least 2"),
    ],
)
def test_what_can_not_be_written_is_refused(folder: Path, options: tuple[str, ...], says: str):
    done = CliRunner().invoke(app, ["rollout", str(folder / "run.yaml"), "--agent", "random", *options])
    assert done.exit_code == 2
    assert says in done.output
