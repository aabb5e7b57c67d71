"""A run folder that the real writers wrote, small and made in milliseconds."""

import time
from pathlib import Path

import torch

from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.run_setup import prepare_folder
from offbeat.envs import registry
from offbeat.services.buffer.group_ledger import LedgerFile, LifeEvent
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.rollout.episodes.state_hash import hash_state
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.copying import replace
from tests.fakes import make_group
from tests.paths import QUICKSTART
from tests.trainer.plain_engine import PlainEngine

STEPS = 3
BEGAN_MS = int(time.time() * 1000) - 10_000
"""Before the lines of steps, which carry the time at which they are written."""
TREE = {
    "reward_normalization": {"method": "mean"},
    "actor_train": {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 1000}},
}


def groups_of(step: int) -> tuple[Group, Group]:
    """A group to train, and one without signal, of the step that makes version `step`."""
    first = 3 * (step - 1)
    version = max(0, step - 2)
    return make_group(first, rewards=(0.0, 1.0, 0.5), version=version), make_group(first + 1, rewards=(1.0, 1.0))


def play(trajectory: Trajectory) -> Trajectory:
    """The trajectory, with the tag, text and digests of walking right and down on FrozenLake."""
    lake = load_run(QUICKSTART).custom_envs["FrozenLake"]
    env = registry.make(lake.env_type, dict(lake.env_config))
    observation, _ = env.reset(seed=trajectory.seed)
    text, turns = ["You walk."], []
    for turn, answer in zip(trajectory.turns, ("right", "down"), strict=True):
        turns.append(turn._replace(state_hash=hash_state(str(observation))))
        text += [str(observation), answer]
        observation, *_ = env.step(answer)
    env.close()
    return replace(trajectory, tag="FrozenLake", turns=tuple(turns), text=tuple(text))


def seat_two(trajectory: Trajectory) -> Trajectory:
    """The trajectory, played by two seats that say the same in turn."""
    turns = tuple(turn._replace(segment=seat) for turn in trajectory.turns for seat in (0, 1))
    rewards = {f"{seat}/reward": trajectory.reward for seat in "ab"}
    return replace(
        trajectory,
        segments=trajectory.segments * 2,
        turns=turns,
        seats=("a", "b") * len(trajectory.turns),
        metrics={**trajectory.metrics, **rewards},
    )


def write_run(
    folder: Path,
    name: str = "lake",
    *overrides: str,
    kept: int = 2,
    text: str = "",
    played: bool = False,
    seats: bool = False,
) -> Path:
    """Three steps of three admitted groups each: one trained, one masked, one dropped; the last checkpoint is of step 2.

    text: of each message of the trained episodes. played: these are real episodes, though their tokens say nothing of it.
    seats: two play each of them.
    """
    settings = (f"exp_name={name}", f"output_dir={folder}", "max_steps=5", *overrides)
    config = load_run(QUICKSTART, list(settings))
    prepare_folder(config)
    (folder / "config.yaml").write_text(dump_yaml(config))
    _write_events(folder)
    learner = LearnerConfig.model_validate(TREE)
    policy = PlainEngine(load_policy(folder / "policy", ModelArgs(), seed=1))
    trainer = BatchTrainer(learner, StepModels(policy), Ranks(0, 0, 1, torch.device("cpu")))
    ledger, log, metrics = StepLedger(folder, 1), BatchLog(folder, 0, 1, kept), MetricsFile(folder / METRICS_FILE)
    ledger.write_resumed(0)
    for step in range(1, STEPS + 1):
        trained, masked = groups_of(step)
        if text:
            members = tuple(replace(each, text=(text,) * 5) for each in trained.trajectories)
            trained = replace(trained, trajectories=members)
        if played:
            trained = replace(trained, trajectories=tuple(map(play, trained.trajectories)))
        if seats:
            trained = replace(trained, trajectories=tuple(map(seat_two, trained.trajectories)))
        batch = StepBatch.build(step - 1, [trained], learner)
        log.record(batch, 1e-2)
        gauges = trainer.train(batch)
        assert trainer.last_step is not None
        log.record_tokens(trainer.last_step)
        taken = StepGroups(groups=[trained, masked], trained=[trained], masked=[masked])
        ledger.write_step(step, taken, max_staleness=1.0, skipped=False)
        values = {**gauges, "reward": Partial("last", step / 2), "trajectories": Partial("sum", 5.0)}
        metrics.write(f"{BEGAN_MS + 1000 * step}-0", MetricRecord("learner", values, step, time=float(step)))
    metrics.flush()
    log.flush()
    ledger.close()
    return folder


def _write_events(folder: Path) -> None:
    rows: list[tuple[int, str, str]] = []
    for step in range(1, STEPS + 1):
        first = 3 * (step - 1)
        numbers = (first, first + 1, first + 2)
        rows += [(number, "admitted", str(step - 1)) for number in numbers]
        rows += [(number, "submitted", str(step - 1)) for number in numbers[:2]]
        rows += [(first + 2, "failed" if step == 1 else "dropped", "step_timeout" if step == 1 else "stale")]
        if step == 2:
            rows += [(number, "trained", "2") for number in (0, 1, 3, 4)]
    rows.append((9, "admitted", "3"))
    ledger = LedgerFile(folder)
    ledger.append(
        [LifeEvent(f"{BEGAN_MS + 100 * i}-0", i + 1, number, *rest) for i, (number, *rest) in enumerate(rows)]
    )
    ledger.close()
