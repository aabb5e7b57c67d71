"""Checks of an algorithm against engine and model."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offbeat.trainer.checks.profiler import check_profiler
from offbeat.trainer.checks.schedule import check_schedule
from offbeat.trainer.checks.trackers import check_trackers
from offbeat.trainer.config.estimators import AGAINST_BEHAVIOR
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.roles import CriticModelType

RATIO_FREE_LOSSES = ("vanilla", "gpg", "kimi15")
"""Losses that treat tokens as on-policy."""
OPTIM = "actor_train.training_args.optim"
ARCHITECTURES: dict[CriticModelType, str] = {
    "auto_sequence_classification": "ForSequenceClassification",
    "auto_token_classification": "ForTokenClassification",
}
"""End of a classifier's name in `config.json`."""


def check_learner(config: LearnerConfig) -> Iterator[ConfigIssue]:
    train = config.actor_train
    has_adapters = train.model_args.lora_target is not None
    is_fsdp2 = train.strategy_args.strategy_name == "fsdp2_train"
    is_base_sharded = has_adapters and (is_fsdp2 or train.strategy_args.zero_stage == 3)
    refers_to_base = config.reference.model_args.model_name_or_path is None
    if has_adapters and config.ref_model_sync_steps is not None:
        yield ConfigIssue(
            "ref_model_sync_steps",
            f"{_own_reference(config)} and never changes: leave it out",
        )
    for full in config.full_kls if is_base_sharded and refers_to_base else ():
        shards = "fsdp2_train" if is_fsdp2 else "zero_stage 3"
        yield ConfigIssue(
            full,
            f"full needs the reference's output embedding, which lora_target with {shards} shards: take k3, or "
            "deepspeed_train with zero_stage 2",
        )
    for key in _leaves(config.critic.model_dump(exclude_defaults=True)) if config.adv_estimator != "gae" else ():
        yield ConfigIssue(
            f"critic.{key}",
            f"adv_estimator {config.adv_estimator} has no critic: leave it out, or take adv_estimator gae",
        )
    yield from _check_float16(config)
    yield from _check_optim(config)
    if config.model_update_frequency - 1 > config.max_staleness:
        frequency = config.model_update_frequency
        yield ConfigIssue(
            "model_update_frequency",
            f"the last of {frequency} steps trains on groups that lag {frequency - 1} versions, but max_staleness is "
            f"{config.max_staleness:g}: set max_staleness to {frequency - 1} or more, or publish more often",
        )
    yield from check_schedule(config)
    yield from _check_models(config)
    yield from _check_reference(config)
    yield from _check_service(config)
    yield from _check_replay(config)
    yield from check_trackers(config)
    yield from check_profiler(config)


def _check_float16(config: LearnerConfig) -> Iterator[ConfigIssue]:
    train = config.actor_train
    roles = {"actor_train": train.model_args.dtype}
    if config.has_own_critic:
        roles["critic"] = config.critic.model_args.dtype or train.model_args.dtype
    half = [role for role, dtype in roles.items() if dtype == "float16"]
    if not half or train.device != "cpu" or train.strategy_args.strategy_name != "deepspeed_train":
        return
    import torch  # noqa: PLC0415  takes seconds

    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():  # what DeepSpeed asks
        yield ConfigIssue(
            f"{half[0]}.model_args.dtype",
            "DeepSpeed can't train in float16 on this CPU: take bfloat16, strategy_args.strategy_name fsdp2_train, or a GPU",
        )


def _check_optim(config: LearnerConfig) -> Iterator[ConfigIssue]:
    optim, name = config.actor_train.training_args.optim, config.actor_train.strategy_args.strategy_name
    if optim == "adamw_torch":
        return
    if name != "deepspeed_train":
        yield ConfigIssue(
            OPTIM, f"{name} trains with moments in float32 alone: leave {optim} out, or take deepspeed_train"
        )
    if find_spec("bitsandbytes") is None:
        yield ConfigIssue(OPTIM, f"{optim} needs bitsandbytes: pip install 'offbeat[quantization]'")


def _leaves(table: dict[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield from (f"{key}.{leaf}" for leaf in _leaves(value)) if isinstance(value, dict) else (key,)


def _check_models(config: LearnerConfig) -> Iterator[ConfigIssue]:
    """Yield missing or unused folders of the critic's and reference's models."""
    folders = {
        "critic.model_args.model_name_or_path": config.critic.model_args.model_name_or_path,
        "reference.model_args.model_name_or_path": config.reference.model_args.model_name_or_path,
        "reward_pretrain": config.reward_pretrain,
    }
    for path, folder in folders.items():
        if folder is not None and folder != config.pretrain and not Path(folder).is_dir():
            yield ConfigIssue(path, f"no such folder: {folder}; set it to a local Hugging Face folder")
    model_type, folder = config.critic.model_args.model_type, Path(config.critic_folder or config.pretrain)
    if config.has_own_critic and model_type is not None and not _is_classifier(folder, model_type):
        yield ConfigIssue(
            "critic.model_args.model_type",
            f"{folder} holds no {ARCHITECTURES[model_type]} of one label: set critic.model_args.model_name_or_path to one, "
            "or leave this out, and the value head is new",
        )
    if config.reward_pretrain not in (None, config.pretrain) and not config.has_own_critic:
        yield ConfigIssue("reward_pretrain", "there is no critic of its own: leave it out, or take adv_estimator gae")
    if not config.needs_reference and not _is_switched_off(config):
        for key in _leaves(config.reference.model_args.model_dump(exclude_none=True)):
            yield ConfigIssue(f"reference.model_args.{key}", _unused_reference(config))
    elif config.actor_train.model_args.lora_target is not None and not config.reference.model_args.model_name_or_path:
        for key in _leaves(config.reference.model_args.overrides):
            yield ConfigIssue(
                f"reference.model_args.{key}",
                f"{_own_reference(config)}: leave it out, or set reference.model_args.model_name_or_path",
            )


def _is_classifier(folder: Path, model_type: CriticModelType) -> bool:
    """Return whether a folder's `config.json` names a classifier of one label."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        architectures, labels = config.get("architectures") or (), config.get("id2label", {"0": "", "1": ""})
        return len(labels) == 1 and any(str(each).endswith(ARCHITECTURES[model_type]) for each in architectures)
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _is_switched_off(config: LearnerConfig) -> bool:
    """Return whether the file itself disables the reference by a coefficient of 0."""
    return "init_kl_coef" in config.model_fields_set and not config.init_kl_coef


def _unused_reference(config: LearnerConfig) -> str:
    """Return why the configuration has no use for a reference."""
    if config.pipeline not in ("dpo", "online_dpo"):
        return "the reference is not used without use_kl_loss or add_token_level_kl: leave it out"
    user = "reference_free" if config.dpo.reference_free else f"loss_type {config.dpo.loss_type}"
    return f"the reference is not used with {user} (dpo): leave it out"


def _own_reference(config: LearnerConfig) -> str:
    """Return what the reference of a policy with adapters is."""
    if config.actor_train.model_args.adapter_name_or_path is not None:
        return "with adapter_name_or_path the reference is the policy with that adapter"
    return "with lora_target the reference is the policy without its adapters"


def _check_reference(config: LearnerConfig) -> Iterator[ConfigIssue]:
    is_unused = not config.needs_reference and not _is_switched_off(config)
    if is_unused and not config.reads_data and config.reference.infer_batch_size is not None:
        yield ConfigIssue("reference.infer_batch_size", _unused_reference(config))
    key, name = "reference.strategy_args.strategy_name", config.reference.strategy_args.strategy_name
    if name == "hf_infer":
        return
    if is_unused:
        yield ConfigIssue(key, _unused_reference(config))
    own_model = config.reference.model_args.model_name_or_path is not None
    if config.actor_train.model_args.lora_target is not None and not own_model:
        yield ConfigIssue(key, f"{_own_reference(config)}: leave it out")
    for full in config.full_kls:
        yield ConfigIssue(key, f"{name} shards the output embedding, which {full} full needs: take hf_infer, or k3")
    if config.ref_model_sync_steps is not None:
        yield ConfigIssue(key, f"{name} can't update a sharded reference (ref_model_sync_steps): take hf_infer")


def _check_service(config: LearnerConfig) -> Iterator[ConfigIssue]:
    """Yield what a service beside the learner can't score."""
    if config.reference.strategy_args.placement == "learner" or config.reads_data:  # of these, `check_data`
        return
    key = "reference.strategy_args.placement"
    if not config.needs_reference and not _is_switched_off(config):
        yield ConfigIssue(key, _unused_reference(config))
    for full in config.full_kls:
        yield ConfigIssue(
            key, f"service gives logprobs of sampled tokens, and {full} full needs all of the vocabulary: take k3"
        )
    if config.ref_model_sync_steps is not None:
        yield ConfigIssue(
            key,
            "service scores groups before their step, and ref_model_sync_steps changes the reference between steps: "
            "take learner",
        )


def check_staleness_controller(
    config: LearnerConfig, *, groups_per_step: int, num_env_groups: int
) -> Iterator[ConfigIssue]:
    control = config.staleness_controller
    if control is None:
        return
    if not control.min_staleness <= config.max_staleness <= control.max_staleness:
        yield ConfigIssue(
            "max_staleness",
            f"{config.max_staleness:g} is not between staleness_controller.min_staleness {control.min_staleness:g} and "
            f"max_staleness {control.max_staleness:g}: start within its bounds",
        )
    min_groups = groups_per_step if control.min_env_groups is None else control.min_env_groups
    max_groups = num_env_groups if control.max_env_groups is None else control.max_env_groups
    if min_groups < groups_per_step:
        yield ConfigIssue(
            "staleness_controller.min_env_groups", f"{min_groups} groups are fewer than one batch of {groups_per_step}"
        )
    if not min_groups <= num_env_groups <= max_groups:
        yield ConfigIssue(
            "train_env_manager.num_env_groups",
            f"{num_env_groups} is not between staleness_controller.min_env_groups {min_groups} and max_env_groups "
            f"{max_groups}: start within its bounds",
        )


def _check_replay(config: LearnerConfig) -> Iterator[ConfigIssue]:
    replay, has_weight = config.replay, config.train_infer_correction.is_weight is not None
    if replay.samples_per_insert is None:
        return
    if replay.samples_per_insert > replay.max_times_sampled:
        yield ConfigIssue(
            "replay.max_times_sampled",
            f"{replay.max_times_sampled} is below the mean, samples_per_insert {replay.samples_per_insert:g}: take more",
        )
    if config.pg_variant in RATIO_FREE_LOSSES and not has_weight:
        yield ConfigIssue(
            "replay.samples_per_insert",
            f"pg_variant {config.pg_variant} has no ratio to correct off-policy data: take ppo, or "
            "old_logprobs=recompute with train_infer_correction.is_weight",
        )
    elif config.old_logprobs != "behavior" and config.pg_variant not in AGAINST_BEHAVIOR and not has_weight:
        yield ConfigIssue(
            "replay.samples_per_insert",
            f"with old_logprobs {config.old_logprobs} the ratio starts at 1 for replayed groups too: take behavior, or add "
            "train_infer_correction.is_weight",
        )
