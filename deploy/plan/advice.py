"""Advice of the planner for a run (`offbeat runs why --plan`)."""

from dataclasses import replace
from pathlib import Path

from offbeat.deploy import run_folder
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.plan.changes import single_changes
from offbeat.deploy.plan.estimate import Effort, estimate
from offbeat.deploy.plan.measurements import PlanError, read_measures
from offbeat.deploy.plan.plan import per_worker_of, setup_of, try_changes
from offbeat.deploy.plan.sleep import measured_notes
from offbeat.deploy.plan.table import name_best_change
from offbeat.services.live_settings import Settings

EPISODES = 2_000
"""Per change and seed."""


def advise(folder: Path, settings: Settings) -> str:
    """Compare the run with its simulation, and name the best change. settings: in force.

    Raises `PlanError` without a readable folder, steps or episodes.
    """
    try:
        config = _with_settings(read_run(folder / run_folder.CONFIG), settings)
    except (ConfigError, OSError) as error:
        raise PlanError(f"the run's folder {folder} can't be read on this machine: {error}") from error
    setup = replace(setup_of(config), partition=())  # shares of a run that has begun, no live setting
    measured = read_measures(folder, config)
    effort = Effort.for_batch(setup.batch, EPISODES)
    now = estimate(setup, measured.measures, effort)
    tried = try_changes(single_changes(setup, measured.measures, per_worker_of(config)), now, effort)
    return (
        f"Simulated from its measured times, the run trains {now.trajectories_per_s:.3g} trajectories/s "
        f"(measured {measured.trajectories_per_s:.3g}). {name_best_change(tried)}"
        + "".join(f" Note: {note}." for note in measured_notes(config))
    )


def _with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    manager = config.train_env_manager.model_copy(update={"num_env_groups": settings.num_env_groups})
    return config.model_copy(
        update={
            "max_staleness": settings.max_staleness,
            "train_env_manager": manager,
            "rollout": config.rollout.model_copy(update={"num_workers": settings.num_workers}),
            "actor_infer": config.actor_infer.model_copy(update={"num_replicas": settings.num_replicas}),
        }
    )
