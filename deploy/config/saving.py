"""A run's configuration as it is saved, without values that other keys imply: an override of those changes them, too.

Invariant: it is read back as the same configuration. The learning rate stays, so that a default of a later build does not
change it.
"""

from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.run import RunConfig
from offbeat.services.reward.kinds.model_config import ModelRewardConfig
from offbeat.trainer.config.roles import ReferenceConfig, TeacherConfig
from offbeat.trainer.config.run import count_groups_ahead, longest_answer

Path = tuple[str | int, ...]


def to_saved_tree(config: RunConfig) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    for *parents, leaf in _implied_keys(config):
        table: Any = tree
        for name in parents:
            table = table[name]
        table.pop(leaf, None)
    return tree


def _implied_keys(config: RunConfig) -> Iterator[Path]:
    yield from _implied_counts(config)
    infer, args = config.actor_infer, config.actor_train.training_args
    if args.per_device_train_batch_size is not None:
        yield "actor_train", "training_args", "max_tokens_per_microbatch"
    if args.gradient_accumulation_steps is not None:
        yield "actor_train", "training_args", "num_minibatches"
    for name, value in infer.model_args:
        if value == getattr(config.actor_train.model_args, name):
            yield "actor_infer", "model_args", name
    for name in config.train_env_manager.generating_args.model_dump(exclude_none=True):
        yield "actor_infer", "generating_args", name
    # Of rows whose answers are sampled it is their limit, too, which may be set
    if not config.sampled_share and infer.generating_args.max_new_tokens == longest_answer(config.custom_envs):
        yield "actor_infer", "generating_args", "max_new_tokens"


def _implied_counts(config: RunConfig) -> Iterator[Path]:
    """Yield numbers of processes that devices imply, and of groups that a batch of rows implies."""
    train, manager = config.actor_train, config.train_env_manager
    if config.actor_infer.device_mapping is not None:
        yield "actor_infer", "num_replicas"
    if train.device_mapping is not None:
        yield "actor_train", "num_processes"
    if config.critic.device_mapping is not None:
        yield "critic", "num_processes"
    if _has_implied_replicas(config.reference, train.device_mapping):
        yield "reference", "strategy_args", "num_replicas"
    for name, teacher in config.teacher.items():
        if _has_implied_replicas(teacher, train.device_mapping):
            yield "teacher", name, "strategy_args", "num_replicas"
    for index, reward in enumerate(config.rewards):
        if isinstance(reward, ModelRewardConfig) and reward.device_mapping is not None:
            yield "rewards", index, "num_replicas"
    if config.reads_data and manager.num_env_groups == count_groups_ahead(config.pipeline, config.rollout_batch_size):
        yield "train_env_manager", "num_env_groups"


def _has_implied_replicas(role: ReferenceConfig | TeacherConfig, policy_devices: tuple[int, ...] | None) -> bool:
    """Return whether devices of its own imply the replicas of a scoring service (`trainer/config/aliases.py`)."""
    devices, strategy = role.device_mapping, role.strategy_args
    if devices is None or devices == policy_devices or strategy.placement != "service":
        return False
    return strategy.num_replicas == len(devices)
