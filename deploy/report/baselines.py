"""Success of reference policies."""

import json

from offbeat.deploy.config.run import RunConfig
from offbeat.envs import frozen_lake, registry, sokoban
from offbeat.envs.frozen_lake import baselines as lake
from offbeat.envs.sokoban import baselines as boxes
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.tasks import EvalTasks

SOKOBAN = {"sokoban", registry.BUILT_IN["sokoban"]}
ENV_TYPES = {*SOKOBAN, "frozen_lake", registry.BUILT_IN["frozen_lake"]}


def run_baselines(config: RunConfig) -> dict[str, float]:
    """Return baselines' mean success on the final evaluation's tasks; empty unless every env has them.

    Never makes an env of the user's, which may need what has ended with the run.
    """
    tags = config.val_env_manager.tags_of(config.custom_envs)
    if not tags or not ENV_TYPES.issuperset(config.custom_envs[tag].env_type for tag in tags):
        return {}
    tasks = EvalTasks(config, config.seed)
    seeds: dict[str, list[int]] = {}
    for number in range(config.final_val_batch_size):
        task = tasks.task(number)
        seeds.setdefault(task.tag, []).append(task.seed)
    sums = {"random": 0.0, "scripted": 0.0, "optimal": 0.0}
    for tag, of_tag in seeds.items():
        scores = _of_tag(config.custom_envs[tag], of_tag)
        if scores is None:
            return {}
        for name, value in scores._asdict().items():
            sums[name] += value * len(of_tag)
    return {name: total / config.final_val_batch_size for name, total in sums.items()}


def _of_tag(env: CustomEnv, seeds: list[int]) -> lake.LakeBaselines | boxes.RoomBaselines | None:
    settings = json.dumps(registry.held_out_config(env.env_type, env.env_config))
    if env.env_type in SOKOBAN:
        return boxes.baselines(seeds, sokoban.SokobanConfig.model_validate_json(settings), max_steps=env.max_steps)
    return lake.baselines(seeds, frozen_lake.FrozenLakeConfig.model_validate_json(settings), max_steps=env.max_steps)
