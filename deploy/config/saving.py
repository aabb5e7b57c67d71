"""A run's configuration as it is saved, without values that other keys imply: an override of those changes them, too.

Invariant: it is read back as the same configuration.
"""

from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.run import longest_answer


def to_saved_tree(config: RunConfig) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    for path in _implied_keys(config):
        *parents, leaf = path.split(".")
        table = tree
        for name in parents:
            table = table[name]
        table.pop(leaf, None)
    return tree


def _implied_keys(config: RunConfig) -> Iterator[str]:
    infer, train, args = config.actor_infer, config.actor_train, config.actor_train.training_args
    if infer.device_mapping is not None:
        yield "actor_infer.num_replicas"
    if train.device_mapping is not None:
        yield "actor_train.num_processes"
    if config.critic.device_mapping is not None:
        yield "critic.num_processes"
    if args.per_device_train_batch_size is not None:
        yield "actor_train.training_args.max_tokens_per_microbatch"
    if args.gradient_accumulation_steps is not None:
        yield "actor_train.training_args.num_minibatches"
    for name in config.train_env_manager.generating_args.model_dump(exclude_none=True):
        yield f"actor_infer.generating_args.{name}"
    if infer.generating_args.max_new_tokens == longest_answer(config.custom_envs):
        yield "actor_infer.generating_args.max_new_tokens"
