"""ROLL's keys of distillation from teachers' distributions."""

from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.roll_data import DATA, EPOCHS, batch_default, batch_rules
from offbeat.deploy.config.importing.rules import Key, Rule, Tree, get, missing, rename, same

MAX_NORM = ("actor_train", "training_args", "max_grad_norm")
UNCLIPPED = 1e9
"""ROLL's default of max_grad_norm is 0, which clips nothing."""
TEACHER = "teacher.teacher.model_args.model_name_or_path"


def _option(key: Key) -> Outcome | None:
    """Take an option under `distill`."""
    return Outcome("renamed", ("distill", *key.path), key.value)


def _clip(key: Key) -> Outcome | None:
    return Outcome("value", MAX_NORM, UNCLIPPED, "clips nothing") if key.value == 0 else None


def _teacher_temperature(key: Key) -> Outcome:
    """Take the divisor of the teacher's logits, which ROLL divides by `kd_temperature`, too."""
    divisor = _divisor(key.tree)
    status = "renamed" if divisor == key.value else "value"
    return Outcome(
        status, ("distill", "teacher_temperature"), divisor, "" if status == "renamed" else "x kd_temperature"
    )


def _divisor(tree: Tree) -> float:
    return (get(tree, "teacher_temperature") or 1) * (get(tree, "kd_temperature") or 1)


DISTILL: tuple[tuple[str, Rule], ...] = (
    *batch_rules(1),
    ("student_pretrain", rename("pretrain")),
    ("teacher_pretrain", rename(TEACHER)),
    ("teacher_temperature", _teacher_temperature),
    ("logits_topk|distill_loss_weight|kd_temperature|kd_objective|distill_on_prompt", _option),
    ("adaptive_kl_alpha|skew_lambda", _option),
    ("logits_transfer_backend", missing("teacher.teacher.strategy_args.placement says where the teacher runs")),
    ("question_key", rename("data.prompt_key")),
    ("answer_key", rename("data.response_key")),
    ("max_grad_norm", _clip),
    ("teacher.teacher.data_args.**", same("as the student's")),
    ("teacher.teacher.use_sequence_packing|use_dynamic_batching_in_infer", same("sequences are always packed")),
    *DATA,
    *EPOCHS,
)  # fmt: skip


def distill_defaults(tree: Tree) -> Iterator[tuple[str, str, Any]]:
    """Yield ROLL's key, ours and ROLL's default, if it differs."""
    yield "", "pipeline", "distill"
    yield "", "data.too_long", "truncate"
    yield batch_default(tree, 1)
    if get(tree, "logits_topk") != 0:
        yield "", "distill.add_tail", False  # both distributions are over the most probable tokens
    if _divisor(tree) != 1:
        yield "teacher_temperature", "distill.teacher_temperature", _divisor(tree)
    yield "max_grad_norm", ".".join(MAX_NORM), UNCLIPPED
    yield "question_key", "data.prompt_key", "question"
    yield "answer_key", "data.response_key", "answer"
    yield "actor_train.training_args.num_train_epochs", "data.num_train_epochs", 1
