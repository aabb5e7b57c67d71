"""Algorithms that a run can't have, beyond what one key says of another: with the key's path and what would be right."""

import importlib
from collections.abc import Collection, Iterator
from pathlib import Path

from offbeat.trainer.config.algorithm import NEEDS_GROUPS, AlgorithmConfig
from offbeat.trainer.config.issue import ConfigIssue


def check_algorithm(
    config: AlgorithmConfig, *, group_size: int, groups_per_step: int, max_steps: int, tags: Collection[str]
) -> Iterator[ConfigIssue]:
    """Every impossible combination of an algorithm with the run around it. tags: those that are played in training."""
    yield from _check_estimator(config, group_size)
    yield from _check_selection(config, groups_per_step)
    yield from _check_old_policy(config)
    yield from _check_full_kl(config)
    yield from _check_teacher(config, tags)
    both = config.pg_clip_low is not None and config.pg_clip_high is not None
    if both and config.pg_clip != AlgorithmConfig.model_fields["pg_clip"].default:
        yield ConfigIssue("pg_clip", "has no effect beside pg_clip_low and pg_clip_high: leave it, or one of them, out")
    if config.use_kl_loss and not config.kl_loss_coef:
        yield ConfigIssue("kl_loss_coef", "use_kl_loss is on with a coefficient of 0: take a positive one")
    if config.add_token_level_kl and not config.init_kl_coef:
        yield ConfigIssue("init_kl_coef", "add_token_level_kl is on with a coefficient of 0: take a positive one")
    if config.ref_model_sync_steps is not None and not config.needs_reference:
        yield ConfigIssue(
            "ref_model_sync_steps",
            "there is no reference to refresh: leave it out, or take use_kl_loss or add_token_level_kl",
        )
    if config.critic_warmup >= max_steps:
        yield ConfigIssue("critic_warmup", f"must be below max_steps ({max_steps}), or the policy never trains")


def _check_estimator(config: AlgorithmConfig, group_size: int) -> Iterator[ConfigIssue]:
    if config.adv_estimator in NEEDS_GROUPS and group_size < 2:
        yield ConfigIssue(
            "train_env_manager.group_size",
            f"adv_estimator {config.adv_estimator} compares the members of a group, and a group of 1 has nobody to compare "
            "with: take at least 2, or adv_estimator gae, reinforce or reinforce_plus_plus",
        )
    if config.adv_estimator == "remax" and config.pg_variant == "gpg":
        yield ConfigIssue(
            "pg_variant",
            "gpg weighs groups by whether their members differ, remax compares with a greedy episode: take ppo",
        )
    if config.adv_estimator == "gigpo" and not config.step_reward_weight and not config.episode_reward_weight:
        yield ConfigIssue("step_reward_weight", "0 beside an episode_reward_weight of 0 leaves nothing to learn from")
    if config.value_targets == "vtrace" and config.old_logprobs != "recompute":
        yield ConfigIssue(
            "value_targets", "vtrace compares the learner's logprobs with the engine's: set old_logprobs=recompute"
        )


def _check_selection(config: AlgorithmConfig, groups_per_step: int) -> Iterator[ConfigIssue]:
    low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
    if config.difficulty_mask and low >= high:
        yield ConfigIssue("difficulty_low_threshold", f"{low} is not below difficulty_high_threshold {high}")
    if config.variance_filter_ratio < 1 and groups_per_step < 2:
        yield ConfigIssue(
            "variance_filter_ratio",
            "a step has one group, so there is nothing to choose: take a larger rollout_batch_size",
        )
    if config.group_filter_cls is not None:
        try:
            load_filter(config.group_filter_cls)
        except ValueError as error:
            yield ConfigIssue("group_filter_cls", str(error))


def _check_old_policy(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    corrected = config.train_infer_correction != type(config.train_infer_correction)()
    if config.pg_variant in ("vanilla", "gpg") and config.old_logprobs != "behavior" and not corrected:
        if config.value_targets == "vtrace":
            return
        yield ConfigIssue(
            "old_logprobs",
            f"{config.old_logprobs} has no effect with pg_variant {config.pg_variant}, which has no ratio: leave it out, or "
            "add train_infer_correction.is_weight",
        )


def _check_full_kl(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    if config.kl_in_reward_is_full and config.old_logprobs != "recompute":
        yield ConfigIssue(
            "kl_penalty",
            f"full compares whole distributions at the step's start, and with old_logprobs {config.old_logprobs} nobody "
            "asks the policy then: set old_logprobs=recompute, or take kl, k2, k3 or abs",
        )


def _check_teacher(config: AlgorithmConfig, tags: Collection[str]) -> Iterator[ConfigIssue]:
    if config.teacher and not config.distills:
        yield ConfigIssue("teacher", "nobody asks them: set use_opd=true or adv_estimator=opd, or leave them out")
    if config.distills and not config.teacher:
        yield ConfigIssue(
            "teacher", "on-policy distillation needs one: give teacher.NAME.pretrain a Hugging Face folder"
        )
    for name, teacher in config.teacher.items():
        if not Path(teacher.pretrain).is_dir():
            yield ConfigIssue(
                f"teacher.{name}.pretrain", f"no such folder: {teacher.pretrain}; give a local Hugging Face folder"
            )
        for position, tag in enumerate(teacher.tag_included):
            if tag not in tags:
                path = f"teacher.{name}.tag_included.{position}"
                yield ConfigIssue(path, f"no tag {tag!r} is trained on; there is {', '.join(sorted(tags)) or 'none'}")
    taught = {tag for teacher in config.teacher.values() for tag in teacher.tag_included or tags}
    if config.adv_estimator == "opd" and config.teacher and (untaught := sorted(set(tags) - taught)):
        yield ConfigIssue(
            "teacher", f"nobody teaches {', '.join(untaught)}, and opd learns from teachers alone: name one"
        )


def load_filter(path: str) -> type:
    """The class that `group_filter_cls` names.

    Raises:
        ValueError: it can't be imported, or is no class that can be called; the message says which.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"expected `module:Class`, got {path!r}")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"can't import {module!r}: {error}") from error
    except Exception as error:  # the module is the user's own: a mistake in it is told
        raise ValueError(f"can't import {module!r}: {type(error).__name__}: {error}") from error
    if not isinstance(found, type) or not any("__call__" in each.__dict__ for each in found.__mro__):
        raise ValueError(f"{module} has no class {name!r} whose instances can be called with a group")
    return found
