"""Single changes of a setting."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offbeat.deploy.plan.limits import Limits
from offbeat.deploy.plan.outcome import Setup
from offbeat.deploy.plan.workload import Measures

GROUP_FACTOR = 1.5
"""For groups in play."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    text: str
    """`KEY=VALUE ...`, or another requirement."""
    setup: Setup
    measures: Measures
    is_setting: bool = True
    """Whether a key of the configuration changes."""


def single_changes(setup: Setup, measures: Measures, per_worker: int) -> Iterator[SettingChange]:
    """Yield the changes. per_worker: slots of a worker."""
    limits = setup.limits
    members = limits.group_size + limits.redundancy
    staleness = limits.max_staleness + 1 if limits.max_staleness >= 1 else float(int(limits.max_staleness) + 1)
    yield _of(setup, measures, f"max_staleness={staleness:g}", max_staleness=staleness)
    groups = max(round(limits.max_groups_in_flight * GROUP_FACTOR), limits.max_groups_in_flight + 1)
    yield with_groups(setup, measures, groups, per_worker)
    workers = -(-limits.max_groups_in_flight * members // per_worker)
    is_limited = bool(measures.worker_s or setup.env_steps or setup.agents)
    if workers > setup.num_workers or is_limited:
        workers = max(workers, setup.num_workers + 1)
        more = replace(setup, slots=workers * per_worker, num_workers=workers)
        yield SettingChange(f"rollout.num_workers={workers}", more, measures)
    yield from _wider_limits(setup, measures)
    if setup.order == "admission":
        yield SettingChange("buffer.order=completion", replace(setup, order="completion"), measures)
    if limits.stale_policy == "drop":
        yield _of(setup, measures, "buffer.stale_policy=train", stale_policy="train")
    redundancy = limits.redundancy + 1
    text = f"train_env_manager.group_size_redundancy={redundancy}"
    yield _of(setup, measures, text, redundancy=redundancy)
    if not measures.turn_s.is_flat:
        number = setup.num_replicas + 1
        text, devices = f"actor_infer.num_replicas={number}", setup.devices_per_engine
        if devices:
            text = f"one engine more ({devices} more device(s) in actor_infer.device_mapping)"
        yield SettingChange(text, replace(setup, num_replicas=number), measures, is_setting=not devices)
    faster = replace(
        measures, train_fixed_s=measures.train_fixed_s / 2, train_per_token_s=measures.train_per_token_s / 2
    )
    yield SettingChange("training in half the time", setup, faster, is_setting=False)


def _wider_limits(setup: Setup, measures: Measures) -> Iterator[SettingChange]:
    """Yield twice the limits that are below the slots."""
    within, steps = setup.within, setup.env_steps
    if steps and steps == within.threads:
        more = replace(within, threads=2 * steps)
        yield SettingChange(f"rollout.num_threads={2 * steps}", replace(setup, within=more), measures)
    elif steps and within.steps and not within.has_lock:
        more = replace(within, steps=_twice(within.steps))
        text = " ".join(f"custom_envs.{tag}.max_env_step_concurrent={limit}" for tag, limit in more.steps)
        yield SettingChange(text, replace(setup, within=more), measures)
    if setup.agents:
        more = replace(within, agents=_twice(within.agents))
        text = " ".join(f"custom_envs.{tag}.agent_runner.num_agents={number}" for tag, number in more.agents)
        yield SettingChange(text, replace(setup, within=more), measures)


def _twice(limits: Limits) -> Limits:
    return tuple((tag, 2 * limit) for tag, limit in limits)


def with_groups(setup: Setup, measures: Measures, groups: int, per_worker: int) -> SettingChange:
    """Return a change of groups in flight and the workers needed."""
    limits = replace(setup.limits, max_groups_in_flight=groups)
    text = f"train_env_manager.num_env_groups={groups}"
    if setup.partition:
        shares = ",".join(map(str, _scale(setup.partition, groups)))
        text += f" train_env_manager.num_groups_partition=[{shares}]"
    workers = max(-(-groups * (limits.group_size + limits.redundancy) // per_worker), setup.num_workers)
    if workers > setup.num_workers:
        text += f" rollout.num_workers={workers}"
    changed = replace(setup, limits=limits, num_workers=workers, slots=workers * per_worker)
    return SettingChange(text, changed, measures)


def _scale(partition: Sequence[int], groups: int) -> list[int]:
    """Return shares of more groups, by the largest remainder."""
    exact = [share * groups / sum(partition) for share in partition]
    scaled = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: scaled[i] - exact[i])
    for i in by_remainder[: groups - sum(scaled)]:
        scaled[i] += 1
    return scaled


def _of(setup: Setup, measures: Measures, text: str, **limits: object) -> SettingChange:
    return SettingChange(text, replace(setup, limits=replace(setup.limits, **limits)), measures)
