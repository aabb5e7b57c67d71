"""ROLL's keys of distillation from teachers' distributions."""

from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.roll_data import DATA, EPOCHS, batch_rules
from offbeat.deploy.config.importing.rules import Key, Rule, Tree, missing, rename, same

TEACHER = "teacher.teacher.model_args.model_name_or_path"


def _option(key: Key) -> Outcome | None:
    """Take an option under `distill`."""
    return Outcome("renamed", ("distill", *key.path), key.value)


def _clip(key: Key) -> Outcome | None:
    return Outcome("no effect", note="0 clips nothing there; set max_grad_norm") if key.value == 0 else None


DISTILL: tuple[tuple[str, Rule], ...] = (
    *batch_rules(1),
    ("student_pretrain", rename("pretrain")),
    ("teacher_pretrain", rename(TEACHER)),
    ("logits_topk|distill_loss_weight|kd_temperature|teacher_temperature|kd_objective|distill_on_prompt", _option),
    ("adaptive_kl_alpha|skew_lambda", _option),
    ("logits_transfer_backend", missing("teacher.teacher.strategy_args.placement says where the teacher runs")),
    ("question_key", rename("data.prompt_key")),
    ("answer_key", rename("data.response_key")),
    ("max_grad_norm", _clip),
    ("teacher.teacher.data_args.**", same("as the student's")),
    *DATA,
    *EPOCHS,
)  # fmt: skip


def distill_defaults(_tree: Tree) -> Iterator[tuple[str, str, Any]]:
    """Yield ROLL's key, ours and ROLL's default, if it differs."""
    yield "", "pipeline", "distill"
    yield "question_key", "data.prompt_key", "question"
    yield "answer_key", "data.response_key", "answer"
    yield "actor_train.training_args.num_train_epochs", "data.num_train_epochs", 1
