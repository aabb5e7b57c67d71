"""ROLL's batches of optimizer steps, where each device becomes a replica of its own."""

import math
from collections.abc import Iterator
from typing import Any, cast

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Tree, get, get_table
from offbeat.services.devices import parse_device_mapping

SHARDING = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
OWN_REPLICA = "each device is a replica of its own"
TRAIN_CONFIG = "actor_train.strategy_args.strategy_config"
SIZE, STEPS, BATCH = 8, 1, 128
"""ROLL's defaults of per_device_train_batch_size, gradient_accumulation_steps and rollout_batch_size."""


def num_shards(tree: Tree, role: str = "actor_train") -> int:
    """Return the devices of one data-parallel replica of a role's model."""
    config = get_table(tree, f"{role}.strategy_args.strategy_config")
    sizes = [config.get(name) for name in SHARDING]
    sizes.append(get(tree, f"{role}.model_args.ulysses_size"))
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def _num_kept_shards(tree: Tree) -> int:
    """Return the devices that divide the tokens of a micro-batch here, too."""
    size = get(tree, "actor_train.model_args.ulysses_size")
    return size if isinstance(size, int) and size > 0 and splits_tokens(tree) else 1


def _num_dropped_shards(tree: Tree) -> int:
    return num_shards(tree) // _num_kept_shards(tree)


def splits_tokens(tree: Tree) -> bool:
    """Return whether ROLL's engine is one that divides the tokens of a micro-batch here, too."""
    return get(tree, "actor_train.strategy_args.strategy_name") == "fsdp2_train"


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
    batch, size = get(tree, "rollout_batch_size") or BATCH, get(tree, "num_return_sequences_in_group") or 1
    return batch * size if isinstance(batch, int) and isinstance(size, int) else None


def _micro_batches(tree: Tree, role: str = "actor_train") -> tuple[int, int]:
    """Return size and number of ROLL's micro-batches per replica and optimizer step."""
    args = get_table(tree, f"{role}.training_args")
    size, steps = args.get("per_device_train_batch_size"), args.get("gradient_accumulation_steps")
    return (
        size if isinstance(size, int) and size > 0 else SIZE,
        steps if isinstance(steps, int) and steps > 0 else STEPS,
    )


def steps_of_batch(tree: Tree, role: str = "actor_train") -> int | None:
    """Return ROLL's optimizer steps per pass over a batch of trajectories."""
    (size, steps), devices, batch = _micro_batches(tree, role), len(read_devices(tree, role)), num_trajectories(tree)
    if not devices or batch is None:
        return None
    return max(1, batch // (size * steps * max(1, devices // num_shards(tree, role))))


def _per_device(tree: Tree) -> tuple[int, int]:
    """Return size and number of a device's micro-batches, where ROLL's shards share them.

    Micro-batches are divided where there are too few.
    """
    (size, steps), shards, share = _micro_batches(tree), _num_dropped_shards(tree), _share_of_batch(tree)
    if share is not None:
        size = math.gcd(size, share)
        return size, share // size
    rest = shards // math.gcd(steps, shards)
    if size % rest:
        return size, max(1, steps // shards)
    return size // rest, steps * rest // shards


def _share_of_batch(tree: Tree) -> int | None:
    """Return a device's trajectories of a batch, if the batch is smaller than ROLL's optimizer step."""
    (size, steps), devices, batch = _micro_batches(tree), num_devices(tree) or 1, num_trajectories(tree)
    if batch is None or size * steps * devices <= batch * num_shards(tree):
        return None
    return max(1, batch // (devices // _num_kept_shards(tree) or 1))


def keep_accumulation(key: Key) -> Outcome | None:
    """Keep ROLL's trajectories per optimizer step, although every device is data-parallel here."""
    if get(key.tree, "actor_train.use_dynamic_batching_in_train"):
        steps = steps_of_batch(key.tree)
        target = ("actor_train", "training_args", "num_minibatches")
        if steps is None:
            return Outcome(
                "no counterpart", note="set actor_train.training_args.num_minibatches, optimizer steps per batch"
            )
        return Outcome("value", target, steps, "optimizer steps per batch; micro-batches are bounded in tokens")
    shards, (size, steps) = _num_dropped_shards(key.tree), _per_device(key.tree)
    if not isinstance(key.value, int):
        return None
    if _share_of_batch(key.tree) is not None:
        return Outcome(
            "value", key.path, steps, "one optimizer step per batch: ROLL counted turns, trajectories count here"
        )
    if shards == 1:
        return None
    exact = (
        ""
        if size * steps * shards == math.prod(_micro_batches(key.tree))
        else "; trajectories per optimizer step change"
    )
    return Outcome("value", key.path, steps, f"{OWN_REPLICA}, which took {shards} devices{exact}")


def keep_micro_batch(key: Key) -> Outcome | None:
    """Divide ROLL's micro-batch where accumulation can't be."""
    if get(key.tree, "actor_train.use_dynamic_batching_in_train"):
        return Outcome("no effect", note="micro-batches are bounded in tokens (max_tokens_per_microbatch_in_train)")
    size, _ = _per_device(key.tree)
    if not isinstance(key.value, int) or size == key.value:
        return None
    note = f"{OWN_REPLICA}, and takes a part of the micro-batch"
    if _share_of_batch(key.tree) is not None:
        note = "one optimizer step per batch, which is smaller than ROLL's step"
    return Outcome("value", key.path, size, note)


def batch_defaults(tree: Tree) -> Iterator[tuple[str, str, Any]]:
    """Yield ROLL's key, ours and its default for the parts of an optimizer step that a file leaves out."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    omits_both = not any(name in get_table(tree, "actor_train.training_args") for name in names)
    if "actor_train" not in tree or (omits_both and _share_of_batch(tree) is not None):
        return  # one optimizer step per batch, as here
    for name, value, convert in zip(names, (SIZE, STEPS), (keep_micro_batch, keep_accumulation), strict=True):
        path = ("actor_train", "training_args", name)
        outcome = convert(Key(path, value, tree)) or Outcome("default", path, value)
        if outcome.target is not None:
            yield ".".join(path), ".".join(outcome.target), outcome.value
