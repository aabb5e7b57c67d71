"""What a step consumes: staleness is checked again, groups without signal and unusable ones are sorted out by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from offbeat.services.buffer.scores import GroupLostError, ScoreRefusedError
from offbeat.services.messages.types import Group, Segment, VersionSpan
from offbeat.trainer.config.learner import AlgorithmConfig
from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.config.roles import InferStrategyArgs, ReferenceConfig, TeacherConfig, TeacherModelArgs
from offbeat.trainer.config.scored_roles import ScoredRole
from offbeat.trainer.data.replay_buffer import ReplayBuffer, ReplayedGroups
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.learner.group_intake import GroupIntake
from offbeat.trainer.learner.score_intake import ScoreIntake
from offbeat.trainer.learner.step_groups import StepGroups
from tests.copying import replace
from tests.fakes import FakeLearnerBuffer, make_group


def take(
    groups: list[Group],
    step: int = 0,
    *,
    bound: float = 1.0,
    train_stale: bool = False,
    newest_version: int | None = None,
    **config: str,
) -> tuple[StepGroups | None, FakeLearnerBuffer]:
    buffer = FakeLearnerBuffer(stream=list(groups))
    intake = GroupIntake(buffer, AlgorithmConfig.model_validate(config), 2, train_stale, 11)
    ended = lambda: not buffer.stream[buffer._delivered :]  # noqa: E731
    return intake.take(step, bound, ended, newest_version=newest_version), buffer


@pytest.mark.parametrize("bound", [1.0, 0.5])
def test_a_group_at_the_bound_is_trained_and_one_beyond_it_dropped(bound: float) -> None:
    groups = [make_group(0, version=2), make_group(1, version=3), make_group(2, version=4)]
    taken, buffer = take(groups, step=4, bound=bound)
    assert taken is not None
    assert [group.number for group in taken.groups] == [1, 2]
    assert buffer.dropped == [(0, "stale")]
    assert taken.dropped == {"stale": 1}


def test_a_group_without_the_baseline_that_the_estimator_wants_is_dropped() -> None:
    groups = [make_group(0), make_group(1, greedy=(0.5,)), make_group(2, greedy=(0.5,))]
    taken, buffer = take(groups, adv_estimator="remax")
    assert taken is not None
    assert [group.number for group in taken.groups] == [1, 2]
    assert buffer.dropped == [(0, "malformed")]


def test_the_oldest_token_of_the_group_decides() -> None:
    young = make_group(0, version=4)
    member = young.trajectories[0]
    segment = replace(member.segments[0], versions=(VersionSpan(3, 5, 2), VersionSpan(7, 9, 4)))
    mixed = replace(young, trajectories=(replace(member, segments=(segment,)), *young.trajectories[1:]))
    taken, buffer = take([mixed, make_group(1, version=4), make_group(2, version=4)], step=4)
    assert taken is not None
    assert buffer.dropped == [(0, "stale")]


def test_stale_groups_may_be_trained_and_are_counted() -> None:
    taken, buffer = take([make_group(0, version=0), make_group(1, version=4)], step=4, train_stale=True)
    assert taken is not None
    assert [group.number for group in taken.groups] == [0, 1]
    assert taken.num_stale == 1
    assert not buffer.dropped


def test_a_group_of_newer_weights_than_the_replayed_step_is_trained() -> None:
    taken, _ = take([make_group(0, version=6), make_group(1, version=5)], step=4, newest_version=6)
    assert taken is not None
    assert len(taken.trained) == 2


def test_a_group_of_weights_that_this_run_never_published_is_dropped() -> None:
    """A worker of an earlier run of the same name has filled it."""
    taken, buffer = take([make_group(0, version=99), make_group(1), make_group(2)], step=0)
    assert taken is not None
    assert [group.number for group in taken.trained] == [1, 2]
    assert buffer.dropped == [(0, "unpublished_version")]
    assert taken.dropped == {"unpublished_version": 1}


@pytest.mark.parametrize(
    ("policy", "consumed", "computed", "refilled"),
    [
        ("mask", [0, 1], [1], {}),
        ("refill", [1, 2], [1, 2], {"1-0": (5, "no_signal")}),
        ("train", [0, 1], [0, 1], {}),
    ],
)
def test_a_group_without_variance(
    policy: str, consumed: list[int], computed: list[int], refilled: dict[str, tuple[int, str]]
) -> None:
    groups = [make_group(0, rewards=(1.0, 1.0), version=4), make_group(1, version=4), make_group(2, version=4)]
    taken, buffer = take(groups, step=4, zero_variance=policy)
    assert taken is not None
    assert [group.number for group in taken.groups] == consumed
    assert [group.number for group in taken.trained] == computed
    assert [group.entry_id for group in taken.refilled] == [*refilled]
    assert taken.dropped == ({"no_signal": 1} if refilled else {})
    assert buffer.refilled == refilled
    assert not buffer.dropped


def broken(how: str) -> Group:
    group = make_group(0)
    member = group.trajectories[0]
    segment = member.segments[0]
    match how:
        case "unknown token":
            tokens = segment.tokens.copy()
            tokens[0] = 11
            member = replace(member, segments=(replace(segment, tokens=tokens),))
        case "sampled first":
            mask = segment.loss_mask.copy()
            mask[0] = True
            member = replace(member, segments=(replace(segment, loss_mask=mask),))
        case "no turn":
            member = replace(member, turns=member.turns[:1])
        case _:
            empty = np.zeros(0, dtype=np.int32)
            mask, logprobs = empty.astype(np.bool_), empty.astype(np.float32)
            nothing = replace(segment, tokens=empty, loss_mask=mask, logprobs=logprobs, versions=())
            member = replace(member, segments=(segment, nothing))
    return replace(group, trajectories=(member, *group.trajectories[1:]))


@pytest.mark.parametrize("how", ["unknown token", "sampled first", "no turn", "empty"])
def test_what_no_step_could_compute_on_is_dropped_by_name(how: str) -> None:
    taken, buffer = take([broken(how), make_group(1), make_group(2)])
    assert taken is not None
    assert [group.number for group in taken.groups] == [1, 2]
    assert buffer.dropped == [(0, "malformed")]


def test_a_stop_ends_the_wait_and_takes_nothing_out() -> None:
    taken, buffer = take([make_group(0)])
    assert taken is None
    assert [group.number for group in buffer.stream] == [0]


def test_refilling_is_bounded() -> None:
    """On a solved task no group has a signal: the step ends with masked groups instead of refilling forever."""
    groups = [make_group(number, rewards=(1.0, 1.0)) for number in range(9)]
    taken, _ = take(groups, zero_variance="refill", max_refill_ratio=2.0)
    assert taken is not None
    assert [group.number for group in taken.refilled] == [0, 1, 2, 3]
    assert [group.number for group in taken.masked] == [4, 5]
    assert not taken.trained


def test_running_statistics_get_every_new_reward_once() -> None:
    """Masked and refilled groups count, replayed ones do not count again."""
    groups = [make_group(0, rewards=(1.0, 1.0)), make_group(1, rewards=(0.0, 1.0)), make_group(2, rewards=(2.0, 3.0))]
    replayed = ReplayedGroups((make_group(9, rewards=(7.0, 8.0)),), (1.0,))
    for policy, rewards in (("mask", [1.0, 1.0, 0.0, 1.0]), ("refill", [0.0, 1.0, 2.0, 3.0, 1.0, 1.0])):
        config = AlgorithmConfig.model_validate({"zero_variance": policy})
        intake = GroupIntake(FakeLearnerBuffer(stream=list(groups)), config, 2, train_stale=False, vocab_size=11)
        taken = intake.take(0, 1.0, lambda: False)
        assert taken is not None
        batch = intake.build_batch(0, taken, replayed)
        assert [list(rewards) for rewards in batch.rewards_by_tag.values()] == [rewards]
        assert StepBatch.unpack(batch.pack(), config).rewards_by_tag == batch.rewards_by_tag


@dataclass
class FakeScores:
    """Scores by group number; a missing one is given at the second look, an exception raised."""

    given: dict[int, bytes | Exception | None]
    looks: int = 0

    def wait(self, number: int, keys: Sequence[str], timeout_s: float) -> dict[str, bytes] | None:  # noqa: ARG002
        self.looks += 1
        given = self.given[number]
        if isinstance(given, Exception):
            raise given
        if given is None:
            self.given[number] = b"late"
            return None
        return dict.fromkeys(keys, given)


REFERENCE = ScoredRole("reference", ReferenceConfig(strategy_args=InferStrategyArgs(placement="service")))
TAUGHT_ELSEWHERE = ScoredRole(
    "teacher.b", TeacherConfig(model_args=TeacherModelArgs(model_name_or_path="b"), tag_included=("elsewhere",))
)


def take_scored(
    given: dict[int, bytes | Exception | None], *, stops: bool = False
) -> tuple[StepGroups | None, FakeLearnerBuffer, FakeScores, list[int | None]]:
    buffer, scores = FakeLearnerBuffer(stream=[make_group(n) for n in range(3)]), FakeScores(given)
    reported: list[int | None] = []

    def report(step: int, group: Group | None) -> None:  # noqa: ARG001
        reported.append(group and group.number)

    roles = {REFERENCE: "reference@1", TAUGHT_ELSEWHERE: "teacher.b@1"}
    intake = GroupIntake(buffer, AlgorithmConfig(), 2, False, 11, ScoreIntake(scores, roles, report))
    return intake.take(0, 1.0, lambda: stops and scores.looks > 0), buffer, scores, reported


def test_taken_groups_carry_the_scores_that_they_need_and_no_others() -> None:
    taken, buffer, scores, reported = take_scored({0: b"zero", 1: b"one"})
    assert taken is not None
    assert [dict(group.scores) for group in taken.trained] == [{"reference@1": b"zero"}, {"reference@1": b"one"}]
    assert all(taken.shaped[group.number].scores == group.scores for group in taken.trained)
    assert (buffer.dropped, scores.looks, reported) == ([], 2, [])


def test_a_late_score_is_waited_for_and_reported() -> None:
    taken, _, _, reported = take_scored({0: b"zero", 1: None})
    assert taken is not None
    assert [group.scores["reference@1"] for group in taken.trained] == [b"zero", b"late"]
    assert reported == [1, None]


@pytest.mark.parametrize(
    ("error", "reason"), [(ScoreRefusedError("reference: no"), "unscorable"), (GroupLostError("gone"), "lost")]
)
def test_a_group_that_gets_no_score_is_dropped_by_name_and_replaced(error: Exception, reason: str) -> None:
    taken, buffer, _, _ = take_scored({0: error, 1: b"one", 2: b"two"})
    assert taken is not None
    assert [group.number for group in taken.trained] == [1, 2]
    assert buffer.dropped == [(0, reason)]
    assert taken.dropped == {reason: 1}


def test_a_wait_for_scores_ends_with_the_learner() -> None:
    taken, buffer, _, _ = take_scored({0: None}, stops=True)
    assert taken is None
    assert buffer.dropped == []


def test_a_kept_group_with_another_models_score_is_no_longer_trained(tmp_path: Path) -> None:
    """A resumed run may have another reference."""
    mine, others = (replace(make_group(n), scores={key: b""}) for n, key in ((0, "reference@1"), (1, "reference@2")))
    config = ReplayConfig(samples_per_insert=1.5)
    replay = ReplayBuffer(config, 2, 1)
    replay.update([mine, others], ReplayedGroups())
    replay.save(tmp_path)
    intake = ScoreIntake(FakeScores({}), {REFERENCE: "reference@1"})
    resumed = ReplayBuffer(config, 2, 1)
    resumed.load(tmp_path, intake.has_scores)
    assert len(replay) == 2
    assert len(resumed) == 1


def test_a_prompt_that_was_not_answered_is_replaced_and_counted() -> None:
    long = make_group(0)
    prompt = Segment(np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.bool_), np.zeros(3, dtype=np.float32), ())
    silent = tuple(replace(member, turns=(), segments=(prompt,)) for member in long.trajectories)
    stream = [replace(long, trajectories=silent), make_group(1), make_group(2)]
    buffer = FakeLearnerBuffer(stream=stream)
    taken = GroupIntake(buffer, AlgorithmConfig(), 2, False, 11, drops_long=True).take(0, 1.0, lambda: False)
    assert taken is not None
    assert ([group.number for group in taken.groups], buffer.dropped) == ([1, 2], [(0, "too_long")])


@pytest.mark.parametrize(("reads_data", "expected"), [(False, [0.7, 0.5]), (True, [None, None])])
def test_a_group_keeps_its_temperature_and_a_row_has_none(reads_data: bool, expected: list[float | None]) -> None:
    stream = [replace(make_group(0), temperature=0.7), replace(make_group(1), temperature=0.5)]
    buffer = FakeLearnerBuffer(stream=stream)
    intake = GroupIntake(buffer, AlgorithmConfig(), 2, False, 11, reads_data=reads_data)
    taken = intake.take(0, 1.0, lambda: False)
    assert taken is not None
    assert [group.temperature for group in taken.groups] == expected


def test_a_replayed_group_without_baselines_is_not_kept_by_a_run_that_needs_them(tmp_path: Path) -> None:
    """A fork with `adv_estimator: remax` of a run with replay."""
    config = ReplayConfig(samples_per_insert=2.0)
    saved, loaded = ReplayBuffer(config, 2, 0), ReplayBuffer(config, 2, 0)
    saved.update([make_group(0), make_group(1, greedy=(0.5,))], ReplayedGroups())
    saved.save(tmp_path)
    intake = GroupIntake(
        FakeLearnerBuffer(), AlgorithmConfig(adv_estimator="remax"), 2, train_stale=False, vocab_size=11
    )
    loaded.load(tmp_path, intake.can_train)
    assert [group.number for group in loaded.select(1, 9.0).groups] == [1]
