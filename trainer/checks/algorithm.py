"""Checks of an algorithm against its run."""

import importlib
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FunctionType

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.user_function import is_function


def check_algorithm(
    config: AlgorithmConfig, *, group_size: int, groups_per_step: int, max_steps: int, tags: Collection[str]
) -> Iterator[ConfigIssue]:
    """Yield invalid combinations. tags: of training episodes."""
    yield from _check_estimator(config, group_size)
    yield from _check_selection(config, groups_per_step)
    yield from _check_old_policy(config)
    yield from _check_full_kl(config)
    yield from _check_teacher(config, tags)
    has_both_bounds = config.pg_clip_low is not None and config.pg_clip_high is not None
    if has_both_bounds and config.pg_clip != AlgorithmConfig.model_fields["pg_clip"].default:
        yield ConfigIssue(
            "pg_clip", "has no effect with both pg_clip_low and pg_clip_high: leave it, or one of them, out"
        )
    if config.pg_variant == "tis" and config.tis_lower_bound >= config.tis_upper_bound:
        yield ConfigIssue(
            "tis_lower_bound", f"{config.tis_lower_bound} is not below tis_upper_bound {config.tis_upper_bound}"
        )
    if config.use_kl_loss and not config.kl_loss_coef:
        yield ConfigIssue("kl_loss_coef", "use_kl_loss needs a positive coefficient")
    if config.add_token_level_kl and not config.init_kl_coef:
        yield ConfigIssue("init_kl_coef", "add_token_level_kl needs a positive coefficient")
    if config.ref_model_sync_steps is not None and not config.needs_reference:
        yield ConfigIssue(
            "ref_model_sync_steps",
            "there is no reference to update: leave it out, or set use_kl_loss or add_token_level_kl",
        )
    if config.critic_warmup >= max_steps:
        yield ConfigIssue(
            "critic_warmup", f"must be below max_steps ({max_steps}); otherwise the policy is never trained"
        )


def _check_estimator(config: AlgorithmConfig, group_size: int) -> Iterator[ConfigIssue]:
    if group_size < 2 and config.needs_siblings:
        yield ConfigIssue(
            "train_env_manager.group_size",
            f"1 with adv_estimator {config.adv_estimator} and this reward_normalization leaves no advantage, because "
            "rewards are compared within a group: take at least 2, or statistics over the batch (norm_mean_type: batch), or "
            "adv_estimator gae, reinforce or reinforce_plus_plus without a method",
        )
    if config.adv_estimator == "remax" and config.pg_variant == "gpg":
        yield ConfigIssue(
            "pg_variant",
            "gpg weights groups by whether their members differ, but remax compares with a greedy episode: take ppo",
        )
    if config.adv_estimator == "gigpo" and not config.step_reward_weight and not config.episode_reward_weight:
        yield ConfigIssue(
            "step_reward_weight", "0 with an episode_reward_weight of 0 leaves no advantage: make one of them positive"
        )
    if config.value_targets == "vtrace" and config.old_logprobs != "recompute":
        yield ConfigIssue(
            "value_targets", "vtrace needs the learner's logprobs at the start of the step: set old_logprobs=recompute"
        )


def check_vtrace_weight(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield V-trace without its weight of the policy loss, which runs of earlier builds may have."""
    if (
        config.value_targets == "vtrace"
        and config.train_infer_correction.is_weight is None
        and not is_function(config.pg_variant)
    ):
        yield ConfigIssue(
            "train_infer_correction.is_weight",
            f"value_targets: vtrace leaves advantages to be weighted by the ratio to the behavior policy, which is not in "
            f"pg_variant {config.pg_variant}: set train_infer_correction.is_weight.upper_bound={config.vtrace_rho_bar:g}, "
            "as vtrace_rho_bar",
        )


def _check_selection(config: AlgorithmConfig, groups_per_step: int) -> Iterator[ConfigIssue]:
    low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
    if config.difficulty_mask and low >= high:
        yield ConfigIssue("difficulty_low_threshold", f"{low} is not below difficulty_high_threshold {high}")
    if config.variance_filter_ratio < 1 and groups_per_step < 2:
        yield ConfigIssue(
            "variance_filter_ratio",
            "a step has only one group to select from: take a larger rollout_batch_size",
        )
    if config.group_filter_cls is not None:
        try:
            load_filter(config.group_filter_cls)
        except ValueError as error:
            yield ConfigIssue("group_filter_cls", str(error))


def _check_old_policy(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    has_correction = config.train_infer_correction != type(config.train_infer_correction)()
    has_ratio = config.pg_variant not in ("vanilla", "gpg")
    variant = f"pg_variant {config.pg_variant}"
    if config.pg_variant == "topr" and not config.topr_negative_weight:
        has_ratio, variant = False, "topr_negative_weight 0"
    in_rewards = config.penalizes_kl or config.distills or config.value_targets == "vtrace"
    if config.old_logprobs == "recompute" and in_rewards:
        return
    if not has_ratio and config.old_logprobs != "behavior" and not has_correction:
        yield ConfigIssue(
            "old_logprobs",
            f"{config.old_logprobs} has no effect with {variant}, which has no ratio: leave it out, or add "
            "train_infer_correction.is_weight",
        )


def _check_full_kl(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    if config.kl_in_reward_is_full and config.old_logprobs != "recompute":
        yield ConfigIssue(
            "kl_penalty",
            f"full needs the policy's distributions at the start of the step, which old_logprobs "
            f"{config.old_logprobs} does not compute: set old_logprobs=recompute, or take kl, k2, k3 or abs",
        )


def _check_teacher(config: AlgorithmConfig, tags: Collection[str]) -> Iterator[ConfigIssue]:
    if config.teacher and not config.distills:
        yield ConfigIssue(
            "teacher", "teachers have no effect: set use_opd=true or adv_estimator=opd, or leave them out"
        )
    if config.distills and not config.teacher:
        yield ConfigIssue(
            "teacher",
            "on-policy distillation needs a teacher: set teacher.NAME.model_args.model_name_or_path to a model folder",
        )
    for name, teacher in config.teacher.items():
        folder = teacher.model_args.model_name_or_path
        if not teacher.model_args.is_tiny and not Path(folder).is_dir():
            path = f"teacher.{name}.model_args.model_name_or_path"
            yield ConfigIssue(path, f"no such folder: {folder}; set it to a local Hugging Face folder")
        for position, tag in enumerate(teacher.tag_included):
            if tag not in tags:
                path = f"teacher.{name}.tag_included.{position}"
                yield ConfigIssue(path, f"no tag {tag!r} is trained on; tags: {', '.join(sorted(tags)) or 'none'}")
    taught_tags = {tag for teacher in config.teacher.values() for tag in teacher.tag_included or tags}
    if config.adv_estimator == "opd" and config.teacher and (missing_tags := sorted(set(tags) - taught_tags)):
        yield ConfigIssue(
            "teacher", f"no teacher for {', '.join(missing_tags)}, but opd learns from teachers alone: add one"
        )


def load_filter(path: str) -> type | FunctionType:
    """Import `group_filter_cls`.

    Raises:
        ValueError: not importable, or instances of the class not callable.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"expected `module:function` or `module:Class`, got {path!r}")
    try:
        filter_class = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"can't import {module!r}: {error}") from error
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"can't import {module!r}: {type(error).__name__}: {error}") from error
    if isinstance(filter_class, FunctionType):
        return filter_class
    if not isinstance(filter_class, type) or not any("__call__" in base.__dict__ for base in filter_class.__mro__):
        raise ValueError(
            f"{module} has no function {name!r}, nor a class of that name whose instances can be called with a group"
        )
    return filter_class
