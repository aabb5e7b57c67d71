"""Batches, slots, staleness and devices of prime-rl's runs."""

from offbeat.deploy.config.importing.numbers import get_count
from offbeat.deploy.config.importing.prime_rl_envs import all_tags, eval_group_size, partition
from offbeat.deploy.config.importing.prime_rl_files import sources
from offbeat.deploy.config.importing.prime_rl_sources import agree, find_shared, find_values
from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Tree, get, get_table

TARGET_LAG = 1
"""Batches that wait for prime-rl's trainer when it stops to sample."""
MAX_OFF_POLICY, BATCH, GROUP = 8, 128, 1
"""prime-rl's defaults of `max_off_policy_steps`, `batch_size` and `group_size`."""


def batch(tree: Tree) -> int:
    """Return a batch's trajectories, which prime-rl counts, too; of `sft` its packed sequences."""
    named = (get(tree, name) for name in ("orchestrator.batch_size", "data.batch_size"))
    return next((value for value in named if isinstance(value, int)), BATCH)


def group_size(tree: Tree) -> int:
    found = find_values(tree, "group_size") if agree(tree, "group_size") else []
    value = found[0] if found else find_shared(tree, "group_size")
    return value if isinstance(value, int) and value > 0 else GROUP


def in_flight(tree: Tree) -> int:
    """Return the episodes in flight: prime-rl's ceiling, else a batch's."""
    for name in ("max_inflight", "initial_inflight"):
        if isinstance(value := get(tree, f"orchestrator.concurrency.{name}"), int):
            return value
    return batch(tree)


def max_off_policy(tree: Tree) -> int:
    return get_count(tree, "orchestrator.max_off_policy_steps", MAX_OFF_POLICY)


def staleness(tree: Tree) -> int:
    """Return the batches that are sampled ahead: in flight, and those that wait, within prime-rl's bound."""
    return min(max_off_policy(tree), TARGET_LAG + -(-in_flight(tree) // batch(tree)))


def take_bound(key: Key) -> Outcome:
    ahead = staleness(key.tree)
    if ahead == key.value:
        return Outcome("renamed", ("max_staleness",), key.value)
    note = (
        "batches in flight, and one that waits for the trainer, as prime-rl samples ahead; groups that take longer are "
        f"trained, too, there up to {key.value} versions"
    )
    return Outcome("value", ("max_staleness",), ahead, note)


def take_slots(key: Key) -> Outcome:
    if not isinstance(key.value, int):
        return Outcome("no counterpart", note="set train_env_manager.num_env_groups")
    if key.path[-1] == "initial_inflight" and get(key.tree, "orchestrator.concurrency.max_inflight"):
        return Outcome("no effect", note="slots are constant: max_inflight counts")
    groups = slots(key.tree)
    return Outcome("value", ("train_env_manager", "num_env_groups"), groups, "groups, constant; prime-rl adapts them")


def slots(tree: Tree) -> int:
    """Return the groups in flight, at least those of a batch, as Offbeat requires."""
    return max(1, max(in_flight(tree), batch(tree)) // group_size(tree))


def take_ratio(key: Key) -> Outcome:
    """Take a source's share as groups in flight, of all tags at once."""
    shares = partition(key.tree, slots(key.tree))
    if not shares:
        return Outcome("same", note="equal shares")
    return Outcome("value", ("train_env_manager", "num_groups_partition"), list(shares), "groups of each tag")


def take_replicas(key: Key) -> Outcome:
    if get_table(key.tree, "deployment"):
        return Outcome("no effect", note="deployment's GPUs count")
    return Outcome("renamed", ("actor_infer", "num_replicas"), key.value)


def devices(tree: Tree) -> tuple[list[int], list[int]] | None:
    """Return the devices of engines and trainer, engines first, as prime-rl numbers them; None without `deployment`."""
    given = get_table(tree, "deployment")
    if not given:
        return None
    node = get_count(tree, "deployment.gpus_per_node", 8)
    if given.get("type", "single_node") == "single_node":
        sampling = get_count(tree, "deployment.num_infer_gpus", 1)
        training = get_count(tree, "deployment.num_train_gpus", 1)
    else:
        nodes = get_count(tree, "deployment.num_infer_nodes", infer_nodes(tree))
        sampling = nodes * get_count(tree, "deployment.num_infer_replicas", 1) * node
        training = get_count(tree, "deployment.num_train_nodes", 1) * node
    return list(range(sampling)), list(range(sampling, sampling + training))


def infer_nodes(tree: Tree) -> int:
    """Return the nodes of a replica, from `inference.deployment`."""
    given = get_table(tree, "inference.deployment")
    if given.get("type") == "disaggregated":
        return sum(
            get_count(tree, f"inference.deployment.{kind}_nodes_per_replica", 1)
            * get_count(tree, f"inference.deployment.num_{kind}_replicas", 1)
            for kind in ("prefill", "decode")
        )
    return get_count(tree, "inference.deployment.num_nodes", 2) if given.get("type") == "multi_node" else 1


def take_devices(key: Key) -> Outcome:
    """Take GPUs of one kind, which `deployment` counts."""
    found = devices(key.tree)
    is_engine = "infer" in key.path[-1] or "eval" in key.path[-1]
    if found is None or (
        key.path[-1] == "num_infer_replicas" and "num_infer_nodes" in get_table(key.tree, "deployment")
    ):
        return Outcome("same", note="part of actor_infer.device_mapping")
    if is_engine and not samples(key.tree):
        return Outcome("no effect", note="nothing is sampled")
    role = "actor_infer" if is_engine else "actor_train"
    mapping = found[0 if is_engine else 1]
    return Outcome("value", (role, "device_mapping"), mapping, f"{len(mapping)} GPUs")


def samples(tree: Tree) -> bool:
    return bool(all_tags(tree))


def eval_size(tree: Tree) -> int | None:
    """Return the episodes of an evaluation; None for all of the tasks."""
    own = {source.get("num_examples") for source in sources(tree, "eval")} - {None}
    examples = own.pop() if len(own) == 1 else get(tree, "orchestrator.eval.num_examples", -1)
    if not isinstance(examples, int) or examples < 0:
        return None
    return examples * eval_group_size(tree) * len(sources(tree, "eval"))
