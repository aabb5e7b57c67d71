"""Checks of the models that the learner computes, whose sequences are packed into one row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.tenancy import read_architecture
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.roles import RoleModelArgs

Kind = Literal["policy", "critic", "reward_model"]
SHARED_PREFIX = "actor_train.model_args.shared_prefix"


def check_packing(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield models of an architecture that can't be packed."""
    models = [(key, Path(folder), kind, args) for key, folder, kind, args in _models(config) if folder is not None]
    models = [each for each in models if (each[1] / "config.json").is_file()]  # a missing folder has its own error
    if not models:
        return
    from transformers import AutoModelForSequenceClassification  # torch takes seconds

    from offbeat.trainer.models.limits import packing_problem
    from offbeat.trainer.models.loading import critic_loader, policy_loader

    context = config.actor_infer.engine.max_model_len or config.sequence_length
    policy = config.actor_train.model_args
    for key, folder, kind, role in models:
        auto = AutoModelForSequenceClassification
        if kind != "reward_model":
            auto = policy_loader(folder) if kind == "policy" else critic_loader(config.critic.model_args.model_type)
        if problem := packing_problem(auto, folder, policy.of_role(role).attn_implementation, context):
            yield ConfigIssue(key, f"{folder}: {problem}")
    if policy.shared_prefix:
        yield from _check_shared_prefix({folder for _, folder, _, _ in models})


def _check_shared_prefix(folders: set[Path]) -> Iterator[ConfigIssue]:
    from offbeat.trainer.models.loading import PREFIX_SHARING_TYPES

    if others := sorted({family for folder in folders if (family := _family(folder))} - {*PREFIX_SHARING_TYPES}):
        tested = ", ".join(PREFIX_SHARING_TYPES)
        yield ConfigIssue(
            SHARED_PREFIX, f"not tested with {', '.join(map(repr, others))}, only with {tested}: leave it out"
        )


def _family(folder: Path) -> str:
    """Return a model's family; an unreadable one has its own error."""
    try:
        return str(read_architecture(folder).get("model_type", ""))
    except ValueError:
        return ""


def _models(config: RunConfig) -> Iterator[tuple[str, str | None, Kind, RoleModelArgs]]:
    """Yield the key, the folder, if any, the kind and the role's arguments of each model."""
    args = "model_args.model_name_or_path"
    pretrain = None if config.pretrain == "tiny" else config.pretrain
    yield "pretrain", pretrain, "reward_model" if config.trains_reward_model else "policy", RoleModelArgs()
    if config.needs_reference:
        yield f"reference.{args}", config.reference.model_args.own_folder, "policy", config.reference.model_args
    if config.has_own_critic:
        is_named = config.critic.model_args.model_name_or_path is not None
        key = f"critic.{args}" if is_named else "reward_pretrain"
        yield key, config.critic_folder, "critic", config.critic.model_args
    for name, teacher in config.teacher.items():
        if teacher.strategy_args.strategy_name != "vllm":  # which packs nothing
            yield f"teacher.{name}.{args}", teacher.model_args.own_folder, "policy", teacher.model_args
