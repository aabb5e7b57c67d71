"""`python -m offbeat.benchmarks.peer.data_worker CONFIG.yaml`: a data pipeline's optimizer steps at its parent's pace.

A step's time includes packing and the reference's logprobs, not tokenization, which env workers do.
"""

import sys
from pathlib import Path

from offbeat.benchmarks.harness.pace import Pace
from offbeat.deploy import run_setup
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.services.messages.types import Group
from offbeat.services.rollout.data.config import GROUP_SIZES
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer


def read_steps(config: RunConfig) -> list[tuple[Group, ...]]:
    """Return each step's groups in order."""
    assert config.data is not None
    model = run_setup.model_folder(config)
    source = DataSource(config.data, config.pipeline, model, seed=config.seed, max_tokens=config.sequence_length)
    size, per_step = GROUP_SIZES[config.pipeline], config.groups_per_step
    steps: list[tuple[Group, ...]] = []
    for step in range(config.max_steps):
        numbers = range(step * per_step, (step + 1) * per_step)
        members = [tuple(source.trajectory(number, index, 0) for index in range(size)) for number in numbers]
        groups = [
            Group(f"{n}-0", str(n), n, config.pipeline, 0, 0, each) for n, each in zip(numbers, members, strict=True)
        ]
        steps.append(tuple(groups))
    return steps


def train(config: RunConfig, ranks: Ranks) -> None:
    pace = Pace(config.actor_train.device)
    trainer = PolicyTrainer(LearnerRun(config.exp_name, config.exp_name, config.output_dir, config), ranks)
    trainer.begin(lambda *_: None, lambda: False)
    steps = read_steps(config)
    pace.ready()
    for step, groups in enumerate(steps):
        pace.before()
        gauges = trainer.train(StepBatch(step, groups, groups))
        pace.after(loss=gauges["loss"].value)
    pace.before()


def main() -> None:
    import torch

    from offbeat.trainer.engines.deepspeed import _deepspeed

    config = read_run(Path(sys.argv[1]))
    torch.set_num_threads(config.actor_train.num_threads)
    with process_group(ranks := ranks_of_environment(config.actor_train.device)):
        _deepspeed(config.actor_train.device)  # its import takes memory that is no part of a step
        train(config, ranks)


if __name__ == "__main__":
    main()
