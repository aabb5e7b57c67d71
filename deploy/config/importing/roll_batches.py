"""ROLL's batches of optimizer steps, where each device becomes a replica of its own."""

import math
from typing import cast

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Tree, get, get_table
from offbeat.services.devices import parse_device_mapping

SHARDING = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
OWN_REPLICA = "each device is a replica of its own"
TRAIN_CONFIG = "actor_train.strategy_args.strategy_config"


def num_shards(tree: Tree, role: str = "actor_train") -> int:
    """Return the devices of one data-parallel replica of a role's model."""
    config = get_table(tree, f"{role}.strategy_args.strategy_config")
    sizes = [config.get(name) for name in SHARDING]
    sizes.append(get(tree, f"{role}.model_args.ulysses_size"))
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def num_devices(tree: Tree) -> int | None:
    return len(read_devices(tree, "actor_train")) or None


def read_devices(tree: Tree, role: str) -> tuple[int, ...]:
    """Return a role's devices; none for an unreadable mapping, which has its own error."""
    try:
        devices = parse_device_mapping(get(tree, f"{role}.device_mapping"))
    except ValueError:
        return ()
    return cast(tuple[int, ...], devices) if isinstance(devices, tuple) else ()


def num_trajectories(tree: Tree) -> int | None:
    """Return the trajectories of a batch; RLVR counts prompts."""
    batch, size = get(tree, "rollout_batch_size"), get(tree, "num_return_sequences_in_group") or 1
    return batch * size if isinstance(batch, int) and isinstance(size, int) else None


def steps_of_batch(tree: Tree, role: str = "actor_train") -> int | None:
    """Return ROLL's optimizer steps per pass over a batch of trajectories."""
    args, devices = get_table(tree, f"{role}.training_args"), len(read_devices(tree, role)) or None
    size, steps, batch = (
        args.get("per_device_train_batch_size"),
        args.get("gradient_accumulation_steps"),
        num_trajectories(tree),
    )
    if devices is None or batch is None or not isinstance(size, int) or not isinstance(steps, int) or size * steps <= 0:
        return None
    per_step = size * steps * max(1, devices // num_shards(tree, role))
    return max(1, batch // per_step)


def keep_accumulation(key: Key) -> Outcome | None:
    """Keep ROLL's trajectories per optimizer step, although every device is data-parallel here."""
    shards = num_shards(key.tree)
    if get(key.tree, "actor_train.use_dynamic_batching_in_train"):
        steps = steps_of_batch(key.tree)
        target = ("actor_train", "training_args", "num_minibatches")
        if steps is None:
            return Outcome(
                "no counterpart", note="set actor_train.training_args.num_minibatches, optimizer steps per batch"
            )
        return Outcome("value", target, steps, "optimizer steps per batch; micro-batches are bounded in tokens")
    if not isinstance(key.value, int):
        return None
    if (fitting := _within_batch(key)) is not None:
        return Outcome(
            "value", key.path, fitting, "one optimizer step per batch: ROLL counted turns, trajectories count here"
        )
    if shards == 1:
        return None
    size, steps = _per_device(key.tree, key.value)
    exact = "" if size * steps * shards == _size(key.tree) * key.value else "; trajectories per optimizer step change"
    return Outcome("value", key.path, steps, f"{OWN_REPLICA}, which took {shards} devices{exact}")


def _size(tree: Tree) -> int:
    """Return ROLL's trajectories of a micro-batch."""
    return get(tree, "actor_train.training_args.per_device_train_batch_size") or 8


def _per_device(tree: Tree, steps: int) -> tuple[int, int]:
    """Return size and number of a device's micro-batches, where ROLL's shards share `steps` of them.

    Micro-batches are divided where there are too few.
    """
    shards, size = num_shards(tree), _size(tree)
    rest = shards // math.gcd(steps, shards)
    if size % rest:
        return size, max(1, steps // shards)
    return size // rest, steps * rest // shards


def _within_batch(key: Key) -> int | None:
    """Return the micro-batches of a whole batch, if fewer than ROLL's."""
    devices, batch, size = num_devices(key.tree), num_trajectories(key.tree), _size(key.tree)
    if devices is None or batch is None or size * (key.value // num_shards(key.tree)) * devices <= batch:
        return None
    return max(1, batch // (size * devices))


def keep_micro_batch(key: Key) -> Outcome | None:
    """Divide ROLL's micro-batch where accumulation can't be."""
    if get(key.tree, "actor_train.use_dynamic_batching_in_train"):
        return Outcome("no effect", note="micro-batches are bounded in tokens (max_tokens_per_microbatch_in_train)")
    steps = get(key.tree, "actor_train.training_args.gradient_accumulation_steps") or 1
    if not isinstance(key.value, int) or not isinstance(steps, int):
        return None
    size, _ = _per_device(key.tree, steps)
    if size == key.value or _within_batch(Key((), steps, key.tree)) is not None:
        return None
    return Outcome("value", key.path, size, f"{OWN_REPLICA}, and takes a part of the micro-batch")
