"""A run's folder says of each group where it is, and of each kept token what became of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from offbeat.deploy.config.loader import dump_yaml
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.console.archive import FolderArchive, find_checkpoint
from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.control.console.archive import GroupQuery, NotRecordedError, UnknownGroupError
from offbeat.services.control.console.schemas import NO_OUTCOME, GroupSort, GroupState
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint import LearnerState, RemoteCheckpoint
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.deploy.console.folders import BEGAN_MS, TREE, groups_of, write_run
from tests.trainer.training.test_checkpoint import write


def numbers(archive: FolderArchive, **query: object) -> list[int]:
    return [group.number for group in archive.groups(GroupQuery(**query)).groups]  # pyright: ignore[reportArgumentType]


def test_each_state_has_its_reason_and_times(archive: FolderArchive) -> None:
    by_number = {group.number: group for group in archive.groups(GroupQuery()).groups}
    assert {number: group.state for number, group in by_number.items()} == {
        0: "trained",
        1: "trained",
        2: "failed",
        3: "trained",
        4: "trained",
        5: "dropped",
        6: "consumed",
        7: "consumed",
        8: "dropped",
        9: "playing",
    }
    assert (by_number[2].reason, by_number[5].reason, by_number[0].reason) == ("step_timeout", "stale", "")
    trained, masked = by_number[3], by_number[4]
    assert (trained.step, trained.checkpoint, trained.staleness, trained.rewards) == (2, 2, 1, [0.0, 1.0, 0.5])
    assert trained.num_sampled == sum(each.num_sampled for each in groups_of(2)[0].trajectories)
    assert trained.admitted_at is not None
    assert trained.submitted_at is not None
    assert trained.ended_at is not None
    assert BEGAN_MS / 1000 <= trained.admitted_at < trained.submitted_at < trained.ended_at < BEGAN_MS / 1000 + 3
    assert trained.trained_at is not None
    assert not masked.computed
    assert masked.reason.startswith("its batch counted it in denominators alone")
    assert (by_number[9].tag, by_number[3].tag) == ("FrozenLake", "tag")
    assert [number for number, group in by_number.items() if group.recorded] == [6, 3]


def test_filters_hold_together_and_pages_follow_each_other(archive: FolderArchive) -> None:
    assert numbers(archive, states=[GroupState.DROPPED, GroupState.FAILED]) == [8, 5, 2]
    assert numbers(archive, step=2) == [4, 3]
    assert numbers(archive, tag="FrozenLake") == [9, 8, 5, 2]
    assert numbers(archive, min_reward=0.6) == [7, 4, 1]
    assert numbers(archive, max_reward=0.6, step=3) == [6]
    page = archive.groups(GroupQuery(offset=3, limit=4))
    assert ([group.number for group in page.groups], page.total, page.next) == ([6, 5, 4, 3], 10, 7)
    assert archive.groups(GroupQuery(offset=9, limit=4)).next is None


def test_the_odd_ones_come_first(archive: FolderArchive) -> None:
    assert numbers(archive, sort=GroupSort.SPREAD)[:3] == [7, 4, 1]
    assert set(numbers(archive, sort=GroupSort.TOKENS)[:3]) == {0, 3, 6}
    assert set(numbers(archive, sort=GroupSort.RATIO)[:2]) == {3, 6}
    assert numbers(archive, sort=GroupSort.STALENESS)[-1] == 2
    durations = archive.groups(GroupQuery(sort=GroupSort.DURATION, states=[GroupState.TRAINED])).groups
    spans = [group.submitted_at - group.admitted_at for group in durations if group.submitted_at and group.admitted_at]
    assert spans == sorted(spans, reverse=True)


def test_members_are_counted_by_what_became_of_their_tokens(archive: FolderArchive) -> None:
    group = archive.group(6)
    assert [(member.index, member.reward, member.turns) for member in group.members] == [
        (0, 0.0, 2),
        (1, 1.0, 2),
        (2, 0.5, 2),
    ]
    for member in group.members:
        assert sum(member.outcomes.values()) == member.num_sampled == 4
    assert group.members[2].outcomes == {"no_advantage": 4}
    ratios = [member.max_ratio for member in group.members if member.max_ratio is not None]
    assert group.max_ratio == max(ratios)
    assert archive.group(2).members == []
    with pytest.raises(UnknownGroupError, match="no group 77: 10 were admitted"):
        archive.group(77)


def test_a_token_has_its_own_numbers(archive: FolderArchive, run_folder: Path) -> None:
    trajectory = archive.trajectory(6, 1)
    source = groups_of(3)[0].trajectories[1]
    (segment,) = trajectory.segments
    mask = source.segments[0].loss_mask
    assert segment.tokens == source.segments[0].tokens.tolist()
    assert segment.mask == mask.astype(int).tolist()
    assert [version for version, sampled in zip(segment.versions, mask, strict=True) if sampled] == [1] * 4
    assert [value is not None for value in segment.logprobs] == mask.tolist()
    recorded = next(each for each in BatchLog(run_folder).read_tokens(3) if (each.group, each.index) == (6, 1))
    for name, column in (
        ("trainer_logprobs", recorded.logprobs),
        ("ratio", recorded.ratio),
        ("advantages", recorded.advantages),
    ):
        values = getattr(segment, name)
        assert [value is not None for value in values] == mask.tolist()
        np.testing.assert_allclose([value for value in values if value is not None], column, rtol=1e-6)
    assert [outcome != NO_OUTCOME for outcome in segment.outcome] == mask.tolist()
    assert (trajectory.step, trajectory.reward, trajectory.reason, len(trajectory.turns)) == (3, 1.0, "", 2)
    assert set(trajectory.pieces) == {str(token) for token in segment.tokens}
    assert all(trajectory.pieces.values())


def test_without_a_tokenizer_tokens_are_numbers_and_the_reason_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "lake")
    shutil.rmtree(folder / "policy")
    trajectory = FolderArchive(folder).trajectory(6, 1)
    assert trajectory.pieces == {}
    assert "tokenizer is not in" in trajectory.reason
    with pytest.raises(NotRecordedError, match="tokenizer is not in"):
        FolderArchive(folder).frames(6, 1)


def test_a_turn_has_the_observation_of_its_seat(tmp_path: Path) -> None:
    """Tokens without recorded text are decoded as a span; turns of two seats alternate, each in a segment of its own."""
    archive = FolderArchive(write_run(tmp_path / "lake", seats=True))
    trajectory, source = archive.trajectory(6, 1), groups_of(3)[0].trajectories[1]
    tokenizer = load_tokenizer(tmp_path / "lake" / "policy")
    prompt, answer = source.segments[0].tokens[:3].tolist(), source.segments[0].tokens[5:7].tolist()
    assert [turn.segment for turn in trajectory.turns] == [0, 1, 0, 1]
    assert trajectory.text == [tokenizer.decode(prompt)]
    assert [turn.observation for turn in trajectory.turns] == ["", *map(tokenizer.decode, (prompt, answer, answer))]


def test_texts_of_an_agents_steps_are_not_taken_for_its_calls(tmp_path: Path) -> None:
    """Two steps were recorded, and four turns."""
    archive = FolderArchive(write_run(tmp_path / "lake", text="of a step", seats=True))
    trajectory = archive.trajectory(6, 1)
    assert (len(trajectory.text), len(trajectory.turns)) == (5, 4)
    assert [turn.observation for turn in trajectory.turns if "of a step" in turn.observation] == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (9, "group 9 is not trained"),
        (7, "group 7 was masked at step 3"),
        (0, "the trajectories of step 1 are not kept: console.keep_steps"),
    ],
)
def test_what_is_not_kept_is_refused_with_the_reason(archive: FolderArchive, number: int, reason: str) -> None:
    with pytest.raises(NotRecordedError, match=reason):
        archive.trajectory(number, 0)


def test_a_member_that_is_not_there_is_refused_with_those_that_are(archive: FolderArchive) -> None:
    with pytest.raises(NotRecordedError, match="group 6 has no trajectory 5 in the batch of step 3: it has 0, 1, 2"):
        archive.trajectory(6, 5)


def test_a_growing_ledger_is_followed(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.deploy.console.groups.REFRESH_INTERVAL_S", 0.0)
    folder = tmp_path / "lake"
    shutil.copytree(run_folder, folder)
    archive = FolderArchive(folder)
    assert len(archive.groups(GroupQuery()).groups) == 10
    event = {"id": "9000000000000-0", "ordinal": 99, "number": 10, "event": "admitted", "detail": "3"}
    with (folder / "ledger" / "groups.jsonl").open("a") as file:
        file.write(json.dumps(event)[:-1])
        file.flush()
        assert len(archive.groups(GroupQuery()).groups) == 10  # a cut line is none yet
        file.write("}\n")
    assert [group.number for group in archive.groups(GroupQuery(limit=1)).groups] == [10]


def test_of_a_large_ledger_the_newest_groups_are_listed_and_all_are_counted(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FolderArchive(run_folder)
    listed, counters = whole.groups(GroupQuery()).groups, whole.counters()
    size = (run_folder / "ledger" / "groups.jsonl").stat().st_size
    monkeypatch.setattr("offbeat.deploy.console.groups.NEWEST_BYTES", size // 2)
    archive = FolderArchive(run_folder)
    newest = archive.groups(GroupQuery()).groups
    assert 0 < len(newest) < len(listed)
    assert [each.number for each in newest] == [each.number for each in listed[: len(newest)]]
    assert archive.counters() == counters
    with pytest.raises(UnknownGroupError, match="group 0 is older than the newest"):
        archive.group(0)


def test_ratios_are_those_of_all_kept_steps(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.deploy.console.trajectories.MAX_CACHED_STEPS", 1)
    archive = FolderArchive(run_folder)
    for _ in range(2):
        groups = {group.number: group for group in archive.groups(GroupQuery()).groups}
        assert {number for number, group in groups.items() if group.max_ratio is not None} == {3, 6}
        assert all(archive.group(number).max_ratio == groups[number].max_ratio for number in (3, 6))


def test_a_step_whose_tokens_are_damaged_hides_no_others(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lake"
    shutil.copytree(run_folder, folder)
    damaged = folder / "batches" / "tokens-000003.msgpack"
    damaged.write_bytes(damaged.read_bytes()[:50])
    archive = FolderArchive(folder)
    ratios = {group.number: group.max_ratio for group in archive.groups(GroupQuery()).groups}
    assert ratios[6] is None
    assert ratios[3] == archive.group(3).max_ratio is not None
    assert archive.trajectory(3, 1).reward == 1.0
    with pytest.raises(NotRecordedError, match=r"tokens-000003.msgpack can't be read: malformed"):
        archive.trajectory(6, 1)


def test_a_run_started_again_in_its_folder_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "lake")
    archive = FolderArchive(folder)
    earlier = archive.trajectory(6, 1)
    assert archive.config()["max_steps"] == 5
    folder.rename(tmp_path / "lake.1")
    training = {"learning_rate": 1e-1, "max_tokens_per_microbatch": 1000}
    monkeypatch.setitem(TREE, "actor_train", {"training_args": training})
    write_run(folder, "lake", "max_steps=9")
    assert archive.config()["max_steps"] == 9
    assert archive.trajectory(6, 1) == FolderArchive(folder).trajectory(6, 1) != earlier


def test_the_ledgers_of_an_older_version_are_read(run_folder: Path, tmp_path: Path) -> None:
    """Their lines of steps have no members."""
    folder = tmp_path / "lake"
    shutil.copytree(run_folder, folder)
    ledger = folder / "ledger" / "steps.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    for row in rows:
        row.pop("members", None)
    ledger.write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = FolderArchive(folder).group(3)
    assert (group.state, group.rewards, group.tag, len(group.members)) == ("trained", [], "FrozenLake", 3)


def test_the_configuration_has_no_passwords(archive: FolderArchive) -> None:
    config = archive.config()
    assert config["exp_name"] == "lake"
    assert config["actor_train.training_args.learning_rate"] == 8e-4
    assert not [key for key in config if key.startswith(("redis", "control", "system_envs"))]


def test_the_configuration_has_no_secret_of_an_env(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "lake")
    path = folder / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["custom_envs"]["FrozenLake"]["env_config"] |= {"api_key": "s3cret", "url": "http://me:s3cret@host:1"}
    path.write_text(yaml.safe_dump(tree))
    config = FolderArchive(folder).config()
    assert "s3cret" not in repr(config)
    assert "custom_envs.FrozenLake.env_config.api_key" in config


def test_a_complete_checkpoint_is_found_by_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, epoch=1)
    state = LearnerState(step=2, lineage="now", next_number=4, kl_coef=0.0, num_processes=1, config={})
    store.save(state, write).result()
    assert find_checkpoint(tmp_path, 2) == str(tmp_path / "checkpoints" / "step-000002")
    with pytest.raises(NotRecordedError, match=r"no checkpoint of step 3 in .*: step-000002"):
        find_checkpoint(tmp_path, 3)
    (tmp_path / "checkpoints" / "step-000002" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(NotRecordedError, match=r"model.safetensors is damaged"):
        find_checkpoint(tmp_path, 2)


def test_a_checkpoint_that_is_in_a_store_alone_is_found_by_its_url(tmp_path: Path) -> None:
    """With `checkpoint_config.keep_local_file: false`."""
    store, url = CheckpointStore(tmp_path / "checkpoints", keep=2, epoch=1), "s3://bucket/run-0123abcd"
    for step in (2, 4):
        store.save(LearnerState(step=step, lineage="now"), write).result()
    names = [f"step-00000{step}.000001-00000{step // 2}" for step in (2, 4)]
    store.note_elsewhere([RemoteCheckpoint(name, int(name[10]), "now", 1, 1) for name in names], url)
    store.release("step-000002").result()
    assert find_checkpoint(tmp_path, 2) == f"{url}/{names[0]}"
    assert find_checkpoint(tmp_path, 4) == str(tmp_path / "checkpoints" / "step-000004")
    with pytest.raises(NotRecordedError, match=rf"of step 3 in .* or {url}: step-000002, step-000004"):
        find_checkpoint(tmp_path, 3)
    (tmp_path / "checkpoints" / "step-000004" / "model.safetensors").write_bytes(b"other")
    assert find_checkpoint(tmp_path, 4) == f"{url}/{names[1]}"


@pytest.mark.parametrize("pipeline", ["sft", "rlvr"])
def test_an_untrained_group_of_rows_has_no_tag_yet(tmp_path: Path, pipeline: str) -> None:
    """Rows have their tags, and which row it is, the learner knows."""
    folder = write_run(tmp_path / "run")
    rows = {"pipeline": pipeline, "data": {"dataset_name": "rows.jsonl"}}
    envs = {} if pipeline == "sft" else {"custom_envs": {"math": {"env_type": "prompt", "max_steps": 1}}}
    config = RunConfig.model_validate_json(json.dumps({"output_dir": str(folder), **rows, **envs}))
    (folder / "config.yaml").write_text(dump_yaml(config))
    groups = {group.number: group.tag for group in FolderArchive(folder).groups(GroupQuery()).groups}
    assert (groups[9], groups[3]) == ("", "tag")
