"""What success means on a run's held-out tasks: what simple walkers and the best possible play achieve."""

from deploy.config import RunConfig
from envs import registry
from envs.frozen_lake import FrozenLakeConfig, FrozenLakeEnv
from envs.frozen_lake.baselines import baselines
from services.rollout.tasks import EvalTasks


def run_baselines(config: RunConfig) -> dict[str, float]:
    """Mean success of each baseline on the tasks of the final evaluation; empty unless every env has baselines."""
    tasks = EvalTasks(config, config.seed)
    seeds: dict[str, list[int]] = {}
    for number in range(config.final_val_batch_size):
        task = tasks.task(number)
        seeds.setdefault(task.tag, []).append(task.seed)
    sums = {"random": 0.0, "scripted": 0.0, "optimal": 0.0}
    for tag, of_tag in seeds.items():
        env = config.custom_envs[tag]
        if registry.find(env.env_type) is not FrozenLakeEnv:
            return {}
        settings = registry.held_out_config(env.env_type, env.env_config)
        found = baselines(of_tag, FrozenLakeConfig.model_validate(settings), max_steps=env.max_steps)
        for name, value in found._asdict().items():
            sums[name] += value * len(of_tag)
    return {name: total / config.final_val_batch_size for name, total in sums.items()}
