"""Roles by devices: those with a mapping, and those with devices of their own."""

from collections.abc import Iterator
from typing import NamedTuple

from offbeat.deploy.config.run import RunConfig
from offbeat.services.reward.kinds.model_config import ModelRewardConfig
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.scored_roles import scored_roles

CRITIC = "critic"
REWARDS = "rewards."


class OwnDevices(NamedTuple):
    """Role whose processes take a device each, shared with no role."""

    name: str
    num_devices: int
    count_key: str
    mapping: tuple[int, ...] | None
    per_process: int = 1


def reward_role(index: int) -> str:
    return f"{REWARDS}{index}"


def roles_with_own_devices(config: RunConfig) -> list[OwnDevices]:
    """Return scoring services, a managed learner's critic and rewards, on GPUs."""
    rewards = [
        OwnDevices(reward_role(index), reward.num_replicas * size, "num_replicas", reward.device_mapping, size)
        for index, reward in enumerate(config.rewards)
        if isinstance(reward, ModelRewardConfig) and (size := reward.gpus_per_replica)
    ]
    if config.actor_train.device == "cpu":
        return rewards
    own = [
        OwnDevices(role.name, role.num_replicas, "strategy_args.num_replicas", role.config.device_mapping)
        for role in scored_roles(config, config.reference)
    ]
    if config.num_critic_processes and config.control.learner == "managed":
        own.append(OwnDevices(CRITIC, config.num_critic_processes, "num_processes", config.critic.device_mapping))
    return [*own, *rewards]


def role_mappings(config: RunConfig) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    yield "actor_train", config.actor_train.device_mapping
    yield "actor_infer", config.actor_infer.device_mapping
    yield CRITIC, config.critic.device_mapping
    yield "reference", config.reference.device_mapping
    for name, teacher in config.teacher.items():
        yield f"teacher.{name}", teacher.device_mapping
    for index, reward in enumerate(config.rewards):
        if isinstance(reward, ModelRewardConfig):
            yield reward_role(index), reward.device_mapping


def check_mappings(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield mappings of roles that can't have one."""
    may_differ = {"actor_train", "actor_infer", CRITIC, *(role.name for role in scored_roles(config, config.reference))}
    for path, mapping in role_mappings(config):
        if mapping is None or path.startswith(REWARDS):
            continue
        role = config.actor_infer if path == "actor_infer" else config.actor_train
        if role.device == "cpu":
            yield ConfigIssue(f"{path}.device_mapping", "has no effect on a CPU: leave it out, or take device cuda")
        elif path not in may_differ and mapping != config.actor_train.device_mapping:
            yield ConfigIssue(
                f"{path}.device_mapping",
                "the learner's processes compute this model: leave it out, or take the devices of actor_train",
            )
