import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import ValidationError
from redis import Redis

from offbeat.services.buffer.api import BufferLimits
from offbeat.services.buffer.learner_client import STOP_STATES
from offbeat.services.control.run import RunState
from offbeat.services.errors import ControlError
from offbeat.services.keys import RunKeys
from offbeat.trainer.config.aliases import canonical_json
from offbeat.trainer.config.run import LearnerRunConfig

START = "start"
"""Subfolder of the weights after the warm start."""


@dataclass(frozen=True, slots=True)
class LearnerRun:
    run_id: str
    lineage: str
    """Id of the run's checkpoints in a shared folder."""
    output_dir: Path
    config: LearnerRunConfig
    uid: str = ""
    """Unique among runs of its name."""

    @property
    def model_folder(self) -> Path:
        """Return the policy folder, with first weights unless new."""
        return self.output_dir / "policy" if self.config.has_policy_folder else Path(self.config.pretrain)

    @property
    def first_weights(self) -> Path:
        """Return the folder of the first weights, written by a warm start."""
        start = self.output_dir / START
        return start if self.config.warm_start is not None and start.is_dir() else self.model_folder

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"

    @property
    def restored(self) -> Path:
        """Return the folder of a downloaded checkpoint."""
        return self.output_dir / "restored"

    @property
    def store_url(self) -> str:
        """Return the URL of this run's checkpoints in the store, or ""."""
        store = self.config.checkpoint_config
        own = self.uid or hashlib.sha256(self.lineage.encode()).hexdigest()
        return f"{store.output_dir.rstrip('/')}/{self.run_id}-{own[:8]}" if store else ""


def read_run(redis: Redis, run_id: str) -> LearnerRun:
    """Read a run's record.

    Raises:
        ControlError: no such run, or an unreadable configuration.
    """
    raw = cast(dict[bytes, bytes], redis.hgetall(RunKeys(run_id).record))
    if b"config" not in raw:
        raise ControlError(f"there is no run {run_id!r} in this Redis")
    try:
        config = LearnerRunConfig.model_validate_json(canonical_json(raw[b"config"]), extra="ignore")
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ControlError(f"run {run_id!r} has a configuration that this build can't read: {details}") from error
    folder = raw.get(b"output_dir", b"").decode() or str(config.output_dir)
    return LearnerRun(run_id, _lineage(raw, config), Path(folder).resolve(), config, raw.get(b"uid", b"").decode())


def prepare_environment(config: LearnerRunConfig) -> None:
    """Set the environment in which steps are computed, before the import of torch."""
    os.environ["OMP_NUM_THREADS"] = str(config.actor_train.num_threads)
    if config.actor_train.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.update(config.environment)


def buffer_limits(config: LearnerRunConfig) -> BufferLimits:
    manager = config.train_env_manager
    return BufferLimits(
        group_size=manager.group_size,
        redundancy=0 if config.reads_data else manager.group_size_redundancy,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        max_groups_in_flight=manager.num_env_groups,
        total_groups=config.max_steps * config.groups_per_step,
        max_attempts=config.buffer.max_attempts,
        worker_timeout_s=config.buffer.worker_timeout_s,
        stale_policy=config.buffer.stale_policy,
        baselines=config.num_baselines,
        temperature=None if config.reads_data else config.temperature,
    )


FINISHED = "finished"
"""`learner_phase` after all steps and evaluations."""


def ended_state(redis: Redis, run_id: str) -> RunState | None:
    """Return the final state; None while steps remain."""
    fields = redis.hmget(RunKeys(run_id).record, ["state", "learner_phase"])
    state, phase = (value.decode() if value else "" for value in cast(list[bytes | None], fields))
    if phase == FINISHED:
        return RunState.FINISHED
    return RunState(state) if state and RunState(state).is_terminal else None


def is_ending(redis: Redis, run_id: str) -> bool:
    desired = cast(bytes | None, redis.hget(RunKeys(run_id).record, "wanted"))
    return desired in STOP_STATES or ended_state(redis, run_id) is not None


def _lineage(raw: dict[bytes, bytes], config: LearnerRunConfig) -> str:
    """Return the lineage, new if resumed from a named checkpoint."""
    created, attempt = (raw.get(key, b"").decode() for key in (b"created_at", b"attempt"))
    return created if isinstance(config.resume_from_checkpoint, bool) else f"{created}/{attempt}"
