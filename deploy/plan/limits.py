"""Limits of concurrent env steps and agents in env workers.

A limit of single tags counts if each trained tag has one: as the sum over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.deploy.config.run import RunConfig

Limits = tuple[tuple[str, int], ...]
"""By tag."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    threads: int | None = None
    """Of a worker, for env steps."""
    has_lock: bool = False
    """Whether a worker's env steps exclude each other."""
    steps: Limits = ()
    """Concurrent env steps of the run."""
    agents: Limits = ()
    """Concurrent agents of a worker."""

    def env_steps(self, num_workers: int) -> int | None:
        """Return a worker's concurrent env steps; None: unlimited."""
        shares = [max(1, limit // num_workers) for _, limit in self.steps]
        limits = [sum(shares)] if shares else []
        limits += [self.threads] if self.threads is not None else []
        limits += [1] if self.has_lock else []
        return min(limits, default=None)

    @property
    def num_agents(self) -> int | None:
        """Return a worker's concurrent episodes of agents; None: unlimited."""
        return sum(number for _, number in self.agents) if self.agents else None


NO_LIMITS = WorkerLimits()


def limits_of(config: RunConfig) -> WorkerLimits:
    names = config.train_env_manager.tags_of(config.custom_envs)
    envs = {name: config.custom_envs[name] for name in names if name in config.custom_envs}
    if not envs:
        return NO_LIMITS
    return WorkerLimits(
        threads=config.rollout.num_threads if all(env.execution == "thread" for env in envs.values()) else None,
        has_lock=all(env.use_thread_lock for env in envs.values()),
        steps=_of_all({name: env.max_env_step_concurrent for name, env in envs.items()}),
        agents=_of_all({name: env.agent_runner and env.agent_runner.num_agents for name, env in envs.items()}),
    )


def _of_all(limits: Mapping[str, int | None]) -> Limits:
    known = [(name, limit) for name, limit in limits.items() if limit is not None]
    return tuple(known) if len(known) == len(limits) else ()
