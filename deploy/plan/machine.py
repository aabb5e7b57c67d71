"""Machine of a plan, divided between engines, workers and learner.

Invariant: critic, scoring services and rewards stay as configured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from offbeat.deploy.config.devices import GPU_ENGINES
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.plan.outcome import Setup
from offbeat.deploy.plan.sleep import all_sleep
from offbeat.deploy.plan.workload import Measures
from offbeat.trainer.config.scored_roles import scored_roles

ROUNDING = 1e-9
"""Of a quotient of CPUs."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpus` and `cpus` of None are unlimited; engines and learner then stay as configured."""

    gpus: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Devices of a run's parts."""

    engines_on_gpus: bool
    learner_on_gpus: bool
    per_engine: int
    """GPUs."""
    cpus_per_engine: float
    cpus_per_worker: float
    learner_processes: int
    cpus_per_process: float
    critic_processes: int = 0
    """Of a critic with processes of its own."""
    other_gpus: int = 0
    """Of scoring services and rewards."""
    other_cpus: float = 0.0
    """Of rewards, and of scoring services on CPUs."""
    shares_gpus: bool = False
    """Whether engines are on the learner's GPUs, in turns with it."""

    @classmethod
    def of(cls, config: RunConfig, machine: Machine) -> "PartSizes":
        infer, train = config.actor_infer, config.actor_train
        may_choose = infer.strategy_args.strategy_name in GPU_ENGINES and machine.gpus is not None
        engines_on_gpus = infer.device == "cuda" or (may_choose and "device" not in infer.model_fields_set)
        chooses = machine.gpus is not None and "device" not in train.model_fields_set
        learner_on_gpus = train.device == "cuda" or chooses
        rewards = [reward for reward in config.rewards if reward.num_replicas]
        scorers = sum(role.num_replicas for role in scored_roles(config, config.reference))
        cpus_per_process = train.num_threads if not learner_on_gpus else 1.0
        return cls(
            engines_on_gpus,
            learner_on_gpus,
            infer.engine.world_size,
            infer.cpus_per_replica,
            config.rollout.cpus_per_worker,
            train.num_processes,
            cpus_per_process,
            config.num_critic_processes,
            sum(reward.num_replicas * reward.gpus_per_replica for reward in rewards)
            + (scorers if learner_on_gpus else 0),
            sum(reward.num_replicas * reward.cpus_per_replica for reward in rewards)
            + (0.0 if learner_on_gpus else scorers * cpus_per_process),
            all_sleep(config),
        )

    def cpus(self, setup: Setup, learner_processes: int) -> float:
        return (
            setup.num_replicas * self.cpus_per_engine
            + setup.num_workers * self.cpus_per_worker
            + (learner_processes + self.critic_processes) * self.cpus_per_process
            + self.other_cpus
        )

    def gpus(self, setup: Setup, learner_processes: int) -> int:
        engines = setup.num_replicas * self.per_engine if self.engines_on_gpus else 0
        learner, critic = (learner_processes, self.critic_processes) if self.learner_on_gpus else (0, 0)
        return self.other_gpus + critic + (max(engines, learner) if self.shares_gpus else engines + learner)

    def workers_within(self, machine: Machine, setup: Setup, learner_processes: int) -> float:
        """Return how many env workers a machine has CPUs for."""
        if machine.cpus is None:
            return inf
        others = self.cpus(replace(setup, num_workers=0), learner_processes)
        return int((machine.cpus - others) / self.cpus_per_worker + ROUNDING)

    def fit(self, machine: Machine, setup: Setup, learner_processes: int) -> bool:
        has_gpus = machine.gpus is None or self.gpus(setup, learner_processes) <= machine.gpus
        return has_gpus and setup.num_workers <= self.workers_within(machine, setup, learner_processes)


@dataclass(frozen=True, slots=True)
class Division:
    """Engines and learner of a machine; training scales with the learner's processes."""

    setup: Setup
    measures: Measures
    learner_processes: int


def divisions(machine: Machine, sizes: PartSizes, setup: Setup, measures: Measures) -> Iterator[Division]:
    """Yield divisions of a machine; without limits, the configured one."""
    if machine.gpus is None and machine.cpus is None:
        yield Division(setup, measures, sizes.learner_processes)
        return
    for replicas in _counts(machine, sizes, setup):
        changed = replace(setup, num_replicas=replicas)
        processes = _learner_processes(machine, sizes, changed)
        if processes >= 1:
            factor = sizes.learner_processes / processes
            scaled = replace(
                measures,
                train_fixed_s=measures.train_fixed_s * factor,
                train_per_token_s=measures.train_per_token_s * factor,
            )
            yield Division(changed, scaled, processes)


def _counts(machine: Machine, sizes: PartSizes, setup: Setup) -> list[int]:
    """Return up to 8 evenly spaced numbers of engines."""
    rooms: list[int] = []
    without = replace(setup, num_replicas=0)
    if machine.gpus is not None and sizes.engines_on_gpus:
        rooms.append((machine.gpus - sizes.gpus(without, 0 if sizes.shares_gpus else 1)) // sizes.per_engine)
    if machine.cpus is not None:
        rooms.append(int((machine.cpus - sizes.cpus(replace(without, num_workers=0), 1)) / sizes.cpus_per_engine))
    if not rooms:
        return [setup.num_replicas]
    most = min(rooms) if not sizes.engines_on_gpus or machine.gpus is not None else min(*rooms, setup.num_replicas)
    return sorted({max(round(most * part / 8), 1) for part in range(1, 9)}) if most >= 1 else []


def _learner_processes(machine: Machine, sizes: PartSizes, setup: Setup) -> int:
    rooms: list[int] = []
    if machine.gpus is not None and sizes.learner_on_gpus:
        rooms.append(machine.gpus - sizes.gpus(replace(setup, num_replicas=0) if sizes.shares_gpus else setup, 0))
    if machine.cpus is not None:
        rooms.append(int((machine.cpus - sizes.cpus(setup, 0)) / sizes.cpus_per_process))
    most = min(rooms, default=sizes.learner_processes)
    return most if sizes.learner_on_gpus and machine.gpus is not None else min(most, sizes.learner_processes)
