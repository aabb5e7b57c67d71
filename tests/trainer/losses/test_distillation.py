"""On-policy distillation: teachers' logprobs as advantages."""

import json
from pathlib import Path

import pytest
import torch

from offbeat.trainer.checks.algorithm import check_algorithm
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.roles import TeacherConfig, TeacherModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.selection import carries_signal
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.losses.targets import build_targets
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.models.tokenizer_check import check_same_tokens
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.fakes import train_on
from tests.trainer.outcome import inputs_of, rich_groups, teacher_logprobs
from tests.trainer.plain_engine import PlainEngine
from tests.trainer.training.test_learning import (
    ALONE,
    GROUPS,
    MEMBERS,
    play,
)
from tests.trainer.trajectories import group, trajectory

TWO = {
    "all": TeacherConfig(model_args=TeacherModelArgs(model_name_or_path="a"), opd_kl_coef=0.5),
    "one": TeacherConfig(model_args=TeacherModelArgs(model_name_or_path="b"), tag_included=("tag1",), opd_kl_coef=2.0),
}


@pytest.mark.parametrize("old", ["behavior", "recompute"])
def test_distilled_advantage_is_weighted_teacher_log_ratio(old: str) -> None:
    config = AlgorithmConfig.model_validate({"adv_estimator": "opd", "teacher": TWO, "old_logprobs": old})
    batch = pack(rich_groups())
    targets = build_targets(batch, config, **inputs_of(batch, config))
    teacher = teacher_logprobs(batch, config).tolist()
    for m in range(batch.num_sampled):
        tag = batch.tags[int(batch.tag[batch.trajectory[m]])]
        own = float(targets.old_logprobs[m])
        expected = -0.5 * (own - teacher[0][m]) - (2.0 * (own - teacher[1][m]) if tag == "tag1" else 0.0)
        assert float(targets.advantages[m]) == pytest.approx(expected, abs=1e-5)
    assert targets.teacher_kl == pytest.approx(-float(targets.advantages.mean()), abs=1e-6)


@pytest.mark.parametrize("base", [{}, {"adv_estimator": "reinforce_plus_plus"}, {"adv_estimator": "gigpo"}])
def test_use_opd_adds_distilled_advantages_to_rewards(base: dict) -> None:
    batch = pack(rich_groups())
    parts = [
        build_targets(batch, config, **inputs_of(batch, config)).advantages
        for config in (
            AlgorithmConfig(**base, use_opd=True, teacher=TWO),
            AlgorithmConfig(**base),
            AlgorithmConfig(adv_estimator="opd", teacher=TWO),
        )
    ]
    torch.testing.assert_close(parts[0], parts[1] + parts[2])


def test_distillation_gives_signal_to_groups_with_equal_rewards() -> None:
    equal = group(0, trajectory(0, [(2, 2, 1.0)]), trajectory(1, [(2, 3, 1.0)]))
    assert not carries_signal(equal, AlgorithmConfig())
    assert carries_signal(equal, AlgorithmConfig(use_opd=True, teacher=TWO))
    assert carries_signal(equal, AlgorithmConfig(adv_estimator="opd", teacher=TWO))


def test_missing_or_unused_teachers_are_reported(tmp_path: Path) -> None:
    def paths(**settings: object) -> list[str]:
        config = AlgorithmConfig.model_validate(settings)
        issues = check_algorithm(config, group_size=4, groups_per_step=4, max_steps=9, tags=("tag0", "tag1"))
        return [issue.path for issue in issues]

    here = TeacherConfig(model_args=TeacherModelArgs(model_name_or_path=str(tmp_path)))
    half = here.model_copy(update={"tag_included": ("tag0",)})
    stray = here.model_copy(update={"tag_included": ("tag9",)})
    assert paths(use_opd=True) == ["teacher"]
    assert paths(teacher={"one": here}) == ["teacher"]
    assert paths(use_opd=True, teacher={"one": here}) == paths(adv_estimator="opd", teacher={"one": here}) == []
    assert paths(use_opd=True, teacher={"one": half}) == []
    assert paths(adv_estimator="opd", teacher={"one": half}) == ["teacher"]
    assert paths(
        use_opd=True, teacher={"one": TeacherConfig(model_args=TeacherModelArgs(model_name_or_path="/nowhere"))}
    ) == ["teacher.one.model_args.model_name_or_path"]
    assert paths(use_opd=True, teacher={"one": stray}) == ["teacher.one.tag_included.0"]


def test_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    for name, words in (("one", ["a", "b"]), ("same", ["a", "b"]), ("other", ["a", "c"])):
        write_tiny_policy(tmp_path / name, TinyPolicyConfig(), words)
    check_same_tokens(tmp_path / "one", tmp_path / "same", "teacher.x.pretrain")
    with pytest.raises(ValueError, match=r"teacher\.x\.pretrain.*'b' is token None instead of 8"):
        check_same_tokens(tmp_path / "one", tmp_path / "other", "teacher.x.pretrain")


def test_student_learns_from_teacher_without_rewards(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    draw = torch.Generator().manual_seed(0)

    def rewards(policy: PackedPolicy, tree: dict, teachers: list[FrozenModel]) -> list[float]:
        training = {"actor_train": {"training_args": {"learning_rate": 1e-2}}}
        config = LearnerConfig.model_validate_json(json.dumps(tree | training))
        batches = BatchTrainer(config, StepModels(PlainEngine(policy), teachers=teachers), ALONE)
        means: list[float] = []
        for step in range(12):
            groups = play(policy, step, draw)
            means.append(sum(t.reward for g in groups for t in g.trajectories) / (GROUPS * MEMBERS))
            train_on(batches, groups, step)
        return means

    teacher = load_policy(tmp_path, ModelArgs(), seed=1)
    assert rewards(teacher, {"adv_estimator": "rloo"}, [])[-1] > 0.6
    pure = {"adv_estimator": "opd", "teacher": {"own": {"model_args": {"model_name_or_path": str(tmp_path)}}}}
    student = load_policy(tmp_path, ModelArgs(), seed=2)
    means = rewards(student, pure, [FrozenModel(teacher, ALONE)])
    assert sum(means[-4:]) / 4 > 2 * max(means[0], 0.2)
