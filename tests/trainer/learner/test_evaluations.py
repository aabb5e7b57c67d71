"""Evaluations: what is recorded, and what is written down."""

import errno
import json
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from redis import Redis

from offbeat.services.messages.codec import decode_trajectories
from offbeat.services.metric_registry import find_metric
from offbeat.services.telemetry import Partial, RedisMetrics
from offbeat.trainer.learner.evaluation_metrics import evaluation_values
from offbeat.trainer.learner.evaluations import (
    MAX_SAVED_EPISODES,
    Evaluation,
    Evaluations,
    RedisEvaluationLog,
    Sampling,
)
from offbeat.trainer.training.fenced_folder import FencedFolder
from tests.fakes import (
    DictLog,
    FakeLearnerBuffer,
    ListSink,
    make_trajectory,
)


def evaluate(
    folder: Path, evaluation: Evaluation, num_done: int, version: int = 3
) -> tuple[ListSink, FakeLearnerBuffer]:
    buffer, sink = FakeLearnerBuffer(), ListSink()
    evaluations = Evaluations(buffer, sink, DictLog(), folder)
    evaluations.start(evaluation)
    evaluations.collect()
    assert not sink.records
    buffer.evaluations[evaluation.eval_id] = [
        make_trajectory(i, reward=float(i % 4 == 0), version=version, text=("sys", "obs", "Down"))
        for i in range(num_done)
    ]
    evaluations.collect()
    return sink, buffer


def test_the_record_shows_success_and_which_weights_played(tmp_path: Path) -> None:
    sink, buffer = evaluate(tmp_path, Evaluation("during", "sampled", 3, 8), num_done=8)
    (record,) = sink.records
    assert (record.source, record.step) == ("eval", 3)
    assert record.labels == {"when": "during", "sampling": "sampled"}
    assert record.values["success"].value == 0.25
    assert record.values["reward"].count == 8.0
    assert (record.values["version_min"].value, record.values["version_max"].value) == (3.0, 3.0)
    assert buffer.started == [("during-sampled-3", 8, "sampled", 3)]
    assert not buffer.evaluations


def test_episodes_that_failed_count_as_failures_in_success_alone(tmp_path: Path) -> None:
    sink, _ = evaluate(tmp_path, Evaluation("after", "greedy", 3, 8), num_done=4)
    values = sink.records[0].values
    assert (values["episodes"].total, values["episodes_failed"].total) == (4.0, 4.0)
    assert values["success"].value == 0.125
    assert values["success_missing"].value == 0.5
    assert values["reward"].count == 4.0


def test_episodes_that_report_no_success_count_as_failures(tmp_path: Path) -> None:
    """Two of four report none, or none that is a number; the best checkpoint is chosen by the same value."""
    values, scores = record(tmp_path, [{"success": 1.0}, {}, {"success": math.nan}, {"success": 1.0}])
    assert (values["success"].value, values["success_missing"].value) == (0.5, 0.5)
    assert scores == [0.5]


def test_tags_without_success_are_not_missing_in_that_of_others(tmp_path: Path) -> None:
    values, _ = record(tmp_path, [{"success": 1.0}, {}, {}], tags=("Walk", "Talk", "Walk"))
    assert (values["success"].value, values["success"].count) == (0.5, 2.0)
    values, scores = record(tmp_path / "rewards", [{}, {}, {}])
    assert "success" not in values
    assert "success_missing" not in values
    assert scores == [1.0]


@pytest.mark.parametrize(("scores_losses", "expected"), [(True, [-0.5]), (False, [])])
def test_the_loss_scores_checkpoints_of_runs_that_do_not_play(
    tmp_path: Path, *, scores_losses: bool, expected: list[float]
) -> None:
    sink, scores = ListSink(), list[float]()
    evaluations = Evaluations(
        FakeLearnerBuffer(),
        sink,
        DictLog(),
        tmp_path,
        lambda _, score: scores.append(score),
        scores_losses=scores_losses,
    )
    evaluations.record_losses(Evaluation("during", "loss", 3, 4), {"loss": Partial("mean", 2.0, 4.0)})
    assert scores == expected
    assert sink.records[0].values["loss"].value == 0.5


def record(
    folder: Path, metrics: Sequence[dict[str, float]], tags: Sequence[str] = ("Walk", "Walk", "Walk", "Walk")
) -> tuple[Mapping[str, Partial], list[float]]:
    """Values and scores of an evaluation whose episodes have the reward 1 and these metrics."""
    buffer, sink, scores = FakeLearnerBuffer(), ListSink(), []
    evaluations = Evaluations(buffer, sink, DictLog(), folder, lambda _, score: scores.append(score))
    evaluation = Evaluation("during", "sampled", 3, len(metrics))
    evaluations.start(evaluation)
    buffer.evaluations[evaluation.eval_id] = [
        structs.replace(make_trajectory(i, reward=1.0), metrics=own, tag=tag)
        for i, (own, tag) in enumerate(zip(metrics, tags, strict=False))
    ]
    evaluations.collect()
    return sink.records[0].values, scores


def test_score_length_and_cut_answers_are_reported_for_all_and_each_tag():
    cut = make_trajectory(2, 2, reward=0.25, num_turns=1)
    cut = structs.replace(cut, tag="Talk", turns=(cut.turns[0]._replace(is_truncated=True),), metrics={})
    played = [make_trajectory(0, 0, reward=1.0, num_turns=3), make_trajectory(1, 1, reward=-0.5, num_turns=2), cut]
    values = {name: part.value for name, part in evaluation_values(played, 4, step=3).items()}
    assert (values["reward"], values["reward_min"], values["reward_max"]) == (0.25, -0.5, 1.0)
    assert [values[f"tokens/response_length/{name}"] for name in ("mean", "min", "max")] == [4.0, 2.0, 6.0]
    assert (values["turns"], values["answers_truncated"]) == (2.0, 1 / 6)
    assert values["episodes_truncated"] == 1 / 3
    walk, talk = (
        {name.removeprefix(f"env/{tag}/"): v for name, v in values.items() if name.startswith(f"env/{tag}/")}
        for tag in ("tag", "Talk")
    )
    assert (walk["reward"], walk["reward_min"], walk["reward_max"]) == (0.25, -0.5, 1.0)
    assert (walk["episodes"], walk["answers_truncated"], walk["success"]) == (2.0, 0.0, 0.25)
    assert (talk["reward_max"], talk["answers_truncated"], talk["tokens/response_length/max"]) == (0.25, 1.0, 2.0)
    assert "success" not in talk
    assert all(find_metric("eval", name) for name in values)


def test_pass_at_k_equals_the_share_of_draws_with_a_success():
    """Against all draws of k out of the group, for groups of 5; the last episodes are no whole group."""
    outcomes = [(1, 0, 0, 1, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (1, 1)]
    flat = [(number, value) for number, value in enumerate(v for group in outcomes for v in group)]
    played = [make_trajectory(0, number, reward=float(value)) for number, value in flat]
    values = evaluation_values(played, len(flat), step=0, group_size=5)
    for k in (2, 4, 5):
        draws = [[any(draw) for draw in combinations(group, k)] for group in outcomes[:3]]
        expected = sum(sum(group) / len(group) for group in draws) / 3
        assert values[f"pass@{k}"].value == values[f"env/tag/pass@{k}"].value == pytest.approx(expected)
    values = {name: value for name, value in values.items() if not name.startswith("env/")}
    assert not [name for name in values if name.startswith("pass@") and name not in ("pass@2", "pass@4", "pass@5")]


def test_pass_at_k_counts_failed_episodes_and_leaves_out_tags_without_success():
    played = [make_trajectory(0, 0, reward=1.0), make_trajectory(0, 3, reward=0.0)]
    silent = [structs.replace(make_trajectory(0, index), tag="Talk", metrics={}) for index in (4, 5)]
    values = evaluation_values([*played, *silent], 6, step=0, group_size=2)
    assert values["pass@2"].value == 0.5
    assert values["env/tag/pass@2"].value == 0.5
    assert "env/Talk/pass@2" not in values


@pytest.mark.parametrize(("sampling", "measured"), [("sampled", True), ("greedy", False)])
def test_the_managers_group_size_gives_pass_at_k(tmp_path: Path, sampling: Sampling, *, measured: bool) -> None:
    buffer, sink = FakeLearnerBuffer(), ListSink()
    evaluations = Evaluations(buffer, sink, DictLog(), tmp_path, group_size=2)
    evaluation = Evaluation("during", sampling, 3, 4)
    evaluations.start(evaluation)
    buffer.evaluations[evaluation.eval_id] = [make_trajectory(0, i, reward=float(i == 1)) for i in range(4)]
    evaluations.collect()
    assert ("pass@2" in sink.records[0].values) == measured
    assert not measured or sink.records[0].values["pass@2"].value == 0.5


def test_an_evaluation_of_which_nothing_came_back_still_ends(tmp_path: Path) -> None:
    sink, _ = evaluate(tmp_path, Evaluation("after", "greedy", 3, 8), num_done=0)
    assert list(sink.records[0].values) == ["episodes_failed"]


def test_the_first_episodes_are_written_down_with_their_text(tmp_path: Path) -> None:
    evaluate(tmp_path, Evaluation("after", "sampled", 3, 50), num_done=50)
    rows = [json.loads(line) for line in (tmp_path / "after-sampled-3.jsonl").read_text().splitlines()]
    assert len(rows) == MAX_SAVED_EPISODES
    assert rows[4]["seed"] == 4
    assert rows[4]["text"] == ["sys", "obs", "Down"]
    assert rows[4]["metrics"] == {"success": 1.0}
    kept = decode_trajectories((tmp_path / "after-sampled-3.trajectories").read_bytes())
    assert [trajectory.seed for trajectory in kept] == [row["seed"] for row in rows]
    assert kept[4].text == ("sys", "obs", "Down")


def test_an_evaluation_that_was_recorded_is_not_played_again(tmp_path: Path) -> None:
    buffer = FakeLearnerBuffer()
    log = DictLog({"before-sampled-0": "recorded", "during-greedy-7": "16"})
    evaluations = Evaluations(buffer, ListSink(), log, tmp_path)
    evaluations.restart()
    evaluations.start(Evaluation("before", "sampled", 0, 8))
    assert buffer.started == [("during-greedy-7", 16, "greedy", 7)]


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    buffer, sink, log = FakeLearnerBuffer(), ListSink(), DictLog()
    evaluations = Evaluations(buffer, sink, log, tmp_path)
    evaluation = Evaluation("during", "sampled", 3, 2)
    evaluations.start(evaluation)
    buffer.evaluations[evaluation.eval_id] = [make_trajectory(i) for i in range(2)]
    with monkeypatch.context() as full:
        full.setattr(FencedFolder, "write", refuse)
        evaluations.collect()
        evaluations.collect()
    assert not sink.records
    assert log.states == {"during-sampled-3": "2"}
    monkeypatch.setattr(evaluations, "_retry_at", 0.0)
    evaluations.collect()
    assert len(sink.records) == 1
    assert log.states == {"during-sampled-3": "recorded"}


class KilledError(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize("method", ["append", "put", "forget_eval"])
def test_a_learner_killed_while_it_records_leaves_one_record_and_no_episodes(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It dies after the record, after the log, or before the episodes are forgotten; metrics and log are Redis'."""
    buffer, redis = FakeLearnerBuffer(), Redis.from_url(redis_url)

    def make(epoch: int) -> Evaluations:
        sink, log = RedisMetrics(redis, "run"), RedisEvaluationLog(redis, "run")
        return Evaluations(buffer, sink, log, tmp_path, epoch=epoch)

    def count() -> int:
        return len(list(RedisMetrics(redis, "run").read()))

    killed, evaluation = make(1), Evaluation("during", "sampled", 3, 2)
    killed.start(evaluation)
    buffer.evaluations[evaluation.eval_id] = [make_trajectory(i) for i in range(2)]
    owner = {"append": RedisMetrics, "put": RedisEvaluationLog, "forget_eval": FakeLearnerBuffer}[method]
    call = getattr(owner, method)

    def die(*args: Any, **options: Any) -> None:
        if method != "forget_eval":
            call(*args, **options)
        raise KilledError

    with monkeypatch.context() as death:
        death.setattr(owner, method, die)
        with pytest.raises(KilledError):
            killed.collect()
    assert count() == 1
    successor = make(2)
    successor.restart()
    successor.collect()
    assert count() == 1
    assert not buffer.evaluations
    successor.discard_after(2)
    successor.start(evaluation)
    buffer.evaluations[evaluation.eval_id] = [make_trajectory(i) for i in range(2)]
    successor.collect()
    assert count() == 2, "of another lineage"


def test_prompts_that_are_too_long_are_counted_and_in_no_mean(tmp_path: Path) -> None:
    """Of three prompts with two answers each, the second is too long."""
    buffer, sink = FakeLearnerBuffer(), ListSink()
    evaluations = Evaluations(buffer, sink, DictLog(), tmp_path, group_size=2, drops_long=True)
    evaluation = Evaluation("after", "sampled", 3, 6)
    evaluations.start(evaluation)
    played = [make_trajectory(0, index, reward=float(index == 5)) for index in range(6)]
    buffer.evaluations[evaluation.eval_id] = [
        structs.replace(each, turns=()) if each.index in (2, 3) else each for each in played
    ]
    evaluations.collect()
    values = {name: part.value for name, part in sink.records[0].values.items()}
    assert (values["prompts_too_long"], values["episodes"], values["episodes_failed"]) == (2.0, 4.0, 0.0)
    assert (values["reward"], values["pass@2"]) == (0.25, 0.5)
    assert find_metric("eval", "prompts_too_long")


def test_rewards_are_means_over_the_tags_that_have_them():
    math_, code = ("math", {"reward/answer": 1.0, "reward/format": 0.5}), ("code", {"reward/tests": 0.25})
    played = [
        structs.replace(make_trajectory(0, index), tag=tag, metrics=metrics)
        for index, (tag, metrics) in enumerate((math_, code, ("math", {"reward/answer": 0.0, "reward/format": 0.0})))
    ]
    values = {name: part.value for name, part in evaluation_values(played, 3, step=0).items()}
    assert (values["reward/answer"], values["reward/format"], values["reward/tests"]) == (0.5, 0.25, 0.25)
    assert (values["env/math/reward/answer"], values["env/code/reward/tests"]) == (0.5, 0.25)
    assert "env/code/reward/answer" not in values
    assert all(find_metric("eval", name) for name in values)
