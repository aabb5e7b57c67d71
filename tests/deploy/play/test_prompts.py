"""Answers to rows without a mesh."""

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.rollouts import EpisodeRequest, run_episodes
from offbeat.deploy.run_setup import write_policy
from offbeat.envs.dataset.arithmetic import write_problems
from offbeat.envs.dataset.files import open_rows
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.messages.types import Completion, EpisodeKind, VersionSpan
from offbeat.services.reward.config import RewardsConfig
from tests.paths import CONFIGS, QUICKSTART


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for name, held_out in (("rows", False), ("val", True)):
        write_problems(tmp_path / f"{name}.jsonl", held_out=held_out)
    files = [f"data.dataset_name={tmp_path / 'rows.jsonl'}", f"data.val_dataset_name={tmp_path / 'val.jsonl'}"]
    return load_run(CONFIGS / "rlvr.yaml", [*files, f"output_dir={tmp_path / 'run'}"])


async def test_validation_rows_are_answered_in_order_and_scored(config: RunConfig, tmp_path: Path):
    write_policy(config, tmp_path / "policy")
    chat = load_chat_format(tmp_path / "policy")
    answer = (*chat.encode(r"\boxed{ 2 }"), chat.end_id)

    async def sample(_: Sequence[int], __: int) -> Completion:
        return Completion("r", answer, (-0.5,) * len(answer), (VersionSpan(0, len(answer), 0),))

    rows = open_rows(tmp_path / "val.jsonl")
    request = EpisodeRequest(2 * len(rows), 2, EpisodeKind.EVAL, seed=1, concurrency=8)
    played = (await run_episodes(config, request, chat, sample, lambda _, __: None)).trajectories
    assert [trajectory.seed for trajectory in played] == [row for row in range(len(rows)) for _ in range(2)]
    expected = [float(rows[trajectory.seed]["ground_truth"] == "2") for trajectory in played]
    assert [trajectory.reward for trajectory in played] == expected
    assert 0 < sum(expected) < len(expected)

    without = config.model_copy(update={"data": config.data.model_copy(update={"val_dataset_name": None})})
    with pytest.raises(ValueError, match=r"there are no validation rows: set it, or take --split train"):
        await run_episodes(without, request, chat, sample, lambda _, __: None)


@pytest.mark.parametrize("per", ["episode", "answer"])
def test_conversations_have_a_rows_earlier_messages(per: str, tmp_path: Path):
    """The policy sees them; answers to train on are its own."""
    given = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "6 + 5"},
    ]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    row = {"messages": given, "ground_truth": "11"}
    rows.write_text("".join(json.dumps(row | {"tag": tag}) + "\n" for tag in ("addition", "mixed")))
    files = [f"data.dataset_name={rows}", f"data.val_dataset_name={rows}", f"output_dir={tmp_path / 'run'}"]
    options = ["--agent", "random", "--episodes", "2", "--per", per, "--out", str(out)]
    done = CliRunner().invoke(app, ["rollout", str(CONFIGS / "rlvr.yaml"), *options, *files])
    assert done.exit_code == 0, done.output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 2
    for each in written:
        messages = each["messages"] if per == "episode" else [*each["prompt"], *each["completion"]]
        assert messages[:-1] == given
        assert messages[-1]["role"] == "assistant"
        assert per == "episode" or each["turn"] == 0


async def test_episodes_of_envs_are_scored_by_the_runs_rewards(tmp_path: Path):
    """A reward of another tag has no part in it."""
    other = {"name": "other", "kind": "regex", "pattern": ".", "tags": ["Other"]}
    left = {"name": "left", "kind": "regex", "pattern": "^Left$", "weight": 3.0}
    rewards = RewardsConfig.model_validate({"rewards": (left, other)}, strict=False).rewards
    config = load_run(QUICKSTART, ["warm_start=null"]).model_copy(update={"rewards": rewards})
    write_policy(config, tmp_path / "policy")
    chat = load_chat_format(tmp_path / "policy")
    answer = (*chat.encode("Left"), chat.end_id)

    async def sample(_: Sequence[int], __: int) -> Completion:
        return Completion("r", answer, (-0.5,) * len(answer), (VersionSpan(0, len(answer), 0),))

    request = EpisodeRequest(4, 2, EpisodeKind.EVAL, seed=1, concurrency=4)
    played = (await run_episodes(config, request, chat, sample, lambda _, __: None)).trajectories
    assert len(played) == 4
    for trajectory in played:
        assert (trajectory.metrics["reward/left"], "reward/other" in trajectory.metrics) == (1.0, False)
        assert trajectory.turns[-1].reward >= 3.0 - 0.5
        assert all(turn.reward < 2.0 for turn in trajectory.turns[:-1])


@pytest.mark.parametrize(
    ("kind", "group_size"), [(EpisodeKind.TRAIN, 2), (EpisodeKind.TRAIN, 1), (EpisodeKind.EVAL, 2)]
)
async def test_episodes_of_training_groups_are_compared(tmp_path: Path, kind: EpisodeKind, group_size: int):
    path = "tests.services.reward.functions:gap_to_best"
    gap = {"name": "gap", "kind": "function", "scope": "group", "path": path}
    rewards = RewardsConfig.model_validate({"rewards": (gap,)}, strict=False).rewards
    config = load_run(QUICKSTART, ["warm_start=null"]).model_copy(update={"rewards": rewards})
    write_policy(config, tmp_path / "policy")
    chat = load_chat_format(tmp_path / "policy")
    answers = cycle([(*chat.encode(word), chat.end_id) for word in ("Left", "Right", "Down")])

    async def sample(_: Sequence[int], __: int) -> Completion:
        answer = next(answers)
        return Completion("r", answer, (-0.5,) * len(answer), (VersionSpan(0, len(answer), 0),))

    request = EpisodeRequest(4, group_size, kind, seed=1, concurrency=4)
    result = await run_episodes(config, request, chat, sample, lambda _, __: None)
    assert [(t.group_id, t.index) for t in result.trajectories] == [
        (str(number // group_size), number % group_size) for number in range(4)
    ]
    is_compared = kind is EpisodeKind.TRAIN and group_size > 1
    for first, second in zip(result.trajectories[::2], result.trajectories[1::2], strict=True):
        gaps = [each.metrics.get("reward/gap") for each in (first, second)]
        if not is_compared:
            assert gaps == [None, None]
            continue
        own = [each.reward - each.metrics["reward/gap"] for each in (first, second)]
        assert gaps == pytest.approx([own[0] - max(own), own[1] - max(own)])


async def test_rewards_of_groups_left_out_leave_tags_and_success_as_they_are(config: RunConfig, tmp_path: Path):
    """A tag whose only reward compares scores 0, as in evaluations, and one whose first compares has no success."""
    gap = {"kind": "function", "scope": "group", "path": "tests.services.reward.functions:gap_to_best"}
    entries = (gap | {"name": "gap"}, {"name": "any", "kind": "regex", "pattern": "(?s).*", "tags": ["addition"]})
    rewards = RewardsConfig.model_validate({"rewards": entries}, strict=False).rewards
    config = config.model_copy(update={"rewards": rewards})
    write_policy(config, tmp_path / "policy")
    chat = load_chat_format(tmp_path / "policy")
    request = EpisodeRequest(8, 1, EpisodeKind.TRAIN, seed=1, concurrency=4)
    result = await run_episodes(config, request, chat, None, lambda _, __: None)
    assert not result.failures
    assert {(each.tag, each.reward) for each in result.trajectories} == {("addition", 1.0), ("mixed", 0.0)}
    assert all("success" not in each.metrics for each in result.trajectories)
