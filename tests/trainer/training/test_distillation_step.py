"""Steps of `pipeline: distill` against plain passes over single sequences, by float64 formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy, read_vocab_size
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from offbeat.trainer.training.teacher_scorer import TeacherScorer
from tests.copying import replace
from tests.trainer.plain_engine import PlainEngine
from tests.trainer.trajectories import group, trajectory

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
SIZES = {"one": 11, "all": 12}
"""Seeds of the teachers' weights."""
ROWS = [
    trajectory(0, [(2, 2, 0.0), (1, 3, 0.0)], base=0, versions=(0, 0), tag="math"),
    trajectory(0, [(3, 1, 0.0)], base=3, versions=(0,), tag="code"),
    trajectory(0, [(1, 2, 0.0), (4, 0, 0.0)], base=2, versions=(0, 0), tag="math"),
]
GROUPS = [replace(group(i, row), tag=row.tag) for i, row in enumerate(ROWS)]


def make_config(folder: Path, **distill: Any) -> LearnerConfig:
    teacher = {"model_args": {"model_name_or_path": str(folder)}}
    return LearnerConfig.model_validate(
        {
            "pipeline": "distill",
            "distill": distill,
            "teacher": {"one": teacher | {"tag_included": ("math",), "opd_kl_coef": 0.5}, "all": teacher},
            "actor_train": {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 12}},
        }
    )


def make_trainer(folder: Path, config: LearnerConfig, keys: dict[str, str] | None = None) -> DataTrainer:
    teachers = [FrozenModel(load_policy(folder, ModelArgs(), seed), ALONE) for seed in SIZES.values()]
    policy = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    own = [None, None] if keys else teachers
    models = StepModels(policy, teachers=own, score_keys=keys or {}, vocab_size=read_vocab_size(folder))
    return DataTrainer(config, models, ALONE)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def outcomes(p: Tensor, q: Tensor, k: int, *, add_tail: bool) -> tuple[Tensor, Tensor]:
    if not 0 < k < len(p):
        return p, q
    ids = p.argsort(descending=True)[:k]
    p, q = p[ids], q[ids]
    if not add_tail:
        return p / p.sum(), q / q.sum()
    return torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])


def plain_loss(folder: Path, config: LearnerConfig) -> tuple[Tensor, list[Tensor]]:
    """Mean KD over taught tokens and mean likelihood over learned ones, token by token; and the policy's gradient."""
    policy = load_policy(folder, ModelArgs(), seed=1).model.double()
    models = [
        load_policy(folder, ModelArgs(attn_implementation="sdpa"), seed).model.double() for seed in SIZES.values()
    ]
    policy.set_attn_implementation("sdpa")
    settings = config.distill
    kd, nll = list[Tensor](), list[Tensor]()
    for each in GROUPS:
        (segment,) = each.trajectories[0].segments
        end = int(segment.loss_mask.nonzero()[0][-1]) + 1
        tokens = torch.from_numpy(segment.tokens[:end]).long()
        logits = policy(tokens[None]).logits[0]
        for t in range(1, end):
            if segment.loss_mask[t]:
                nll.append(-logits[t - 1].log_softmax(0)[tokens[t]])
            elif not settings.distill_on_prompt:
                continue
            q = (logits[t - 1] / settings.kd_temperature).softmax(0)
            values = list[Tensor]()
            for model, (_, teacher) in zip(models, config.teacher.items(), strict=True):
                if teacher.teaches(each.tag):
                    p = (model(tokens[None]).logits[0, t - 1].detach() / settings.teacher_temperature).softmax(0)
                    pair = outcomes(p, q, settings.logits_topk, add_tail=settings.add_tail)
                    if settings.kd_objective == "reverse_kl":
                        pair = pair[::-1]
                    values.append(teacher.opd_kl_coef * kl(*pair))
            kd.append(torch.stack(values).sum())
    weight = settings.distill_loss_weight
    loss = weight * torch.stack(kd).mean() + (1 - weight) * torch.stack(nll).mean()
    return loss.detach(), list(torch.autograd.grad(loss, list(policy.parameters())))


CASES: dict[str, dict[str, Any]] = {
    "whole vocabulary": {"logits_topk": 0},
    "more than the vocabulary": {"logits_topk": 1000},
    "most probable": {"logits_topk": 3},
    "most probable alone": {"logits_topk": 3, "add_tail": False},
    "reverse": {"logits_topk": 2, "kd_objective": "reverse_kl"},
    "temperatures": {"logits_topk": 0, "kd_temperature": 2.0, "teacher_temperature": 0.5},
    "on prompts": {"logits_topk": 3, "distill_on_prompt": True},
    "teachers alone": {"logits_topk": 0, "distill_loss_weight": 1.0},
}


@pytest.mark.parametrize("name", CASES)
def test_a_steps_loss_and_gradient_equal_plain_passes(folder: Path, name: str):
    config = make_config(folder, **CASES[name])
    trainer = make_trainer(folder, config)
    expected, gradients = plain_loss(folder, config)
    evaluated = trainer.evaluate(GROUPS)
    trained = trainer.train(StepBatch(0, tuple(GROUPS), tuple(GROUPS)))
    assert evaluated["loss"].value == pytest.approx(float(expected), rel=1e-5)
    assert trained["loss"].value == pytest.approx(float(expected), rel=1e-5)
    engine = trainer._models.policy
    assert isinstance(engine, PlainEngine)
    own = [p.grad for p in engine.module.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    clip = min(1.0, 1.0 / float(norm))
    for gradient, theirs in zip(own, gradients, strict=True):
        torch.testing.assert_close(gradient.double(), theirs * clip, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("settings", [{"logits_topk": 0}, {"logits_topk": 3, "distill_on_prompt": True}])
def test_scores_that_come_with_the_groups_train_the_same(folder: Path, settings: dict[str, Any]):
    config = make_config(folder, **settings)
    keys = {f"teacher.{name}": f"teacher.{name}@1" for name in SIZES}
    scored = list[Group]()
    for each in GROUPS:
        scores = dict[str, bytes]()
        for (name, teacher), seed in zip(config.teacher.items(), SIZES.values(), strict=True):
            model = FrozenModel(load_policy(folder, ModelArgs(), seed), ALONE)
            if teacher.teaches(each.tag):
                (encoded,) = TeacherScorer(model, config, None, read_vocab_size(folder)).encode([each])
                assert encoded.is_finite
                scores[keys[f"teacher.{name}"]] = encoded.blob
        scored.append(replace(each, scores=scores))
    weights = list[Tensor]()
    for trainer, groups in ((make_trainer(folder, config), GROUPS), (make_trainer(folder, config, keys), scored)):
        trainer.train(StepBatch(0, tuple(groups), tuple(groups)))
        weights.append(torch.cat([tensor.flatten() for _, tensor in trainer._models.policy.tensors()]))
    assert torch.equal(*weights)


def test_scores_of_other_tokens_are_refused(folder: Path):
    config = make_config(folder, logits_topk=3)
    trainer = make_trainer(folder, config, {f"teacher.{name}": f"teacher.{name}@1" for name in SIZES})
    with pytest.raises(ValueError, match=r"needs distributions of 5 tokens .* has none"):
        trainer.evaluate(GROUPS)


def test_rows_without_a_teacher_have_a_likelihood_alone(folder: Path):
    config = make_config(folder, logits_topk=3)
    only_math = config.model_copy(update={"teacher": {"one": config.teacher["one"]}})
    teachers = [FrozenModel(load_policy(folder, ModelArgs(), 11), ALONE)]
    policy = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    trainer = DataTrainer(only_math, StepModels(policy, teachers=teachers, vocab_size=read_vocab_size(folder)), ALONE)
    gauges = trainer.evaluate([GROUPS[1]])
    assert gauges["kd_loss"].value == 0
    assert gauges["loss"].value == pytest.approx(0.5 * gauges["sft_loss"].value)
    assert gauges["sft_loss"].value > 0


def test_a_batch_without_learned_tokens_trains_nothing(folder: Path):
    empty = [group(0, trajectory(0, [(3, 0, 0.0)]))]
    trainer = make_trainer(folder, make_config(folder))
    assert trainer.evaluate(empty) == {}
    assert trainer.train(StepBatch(0, tuple(empty), tuple(empty))) == {}


@pytest.mark.parametrize("on_prompt", [False, True])
def test_what_the_policy_sampled_has_no_likelihood_term(folder: Path, on_prompt: bool):
    config = make_config(folder, logits_topk=3, distill_on_prompt=on_prompt)
    sampled = replace(ROWS[0], metrics={"sampled": 1.0})
    groups = [replace(GROUPS[0], trajectories=(sampled,)), GROUPS[1]]
    given = make_trainer(folder, config).evaluate(GROUPS[:2])
    mixed = make_trainer(folder, config).evaluate(groups)
    alone = make_trainer(folder, config).evaluate([GROUPS[1]])
    assert mixed["kd_loss"] == given["kd_loss"]
    assert mixed["actor/entropy"] == given["actor/entropy"], "also of tokens that a teacher alone trains"
    assert mixed["sft_loss"].count == alone["sft_loss"].count < given["sft_loss"].count
    assert mixed["sft_loss"].value == pytest.approx(alone["sft_loss"].value)
