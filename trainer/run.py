"""A run as its learner reads it: the training part of the configuration in the run's record.

Invariant: the record is the only source; nothing is read from the environment or guessed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import ConfigDict, ValidationError
from redis import Redis

from offbeat.services.buffer.config import BufferConfig
from offbeat.services.buffer.learner_client import ENDINGS
from offbeat.services.control.run import RunState
from offbeat.services.errors import ControlError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import Settings, configured_settings
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig, RolloutConfig
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import AdapterSettings
from offbeat.trainer.config.learner import LearnerConfig


class LearnerRunConfig(LearnerConfig):
    """The learner's part of a run's configuration; what belongs to other services is passed over."""

    model_config = ConfigDict(extra="ignore")

    custom_envs: dict[str, CustomEnv]
    train_env_manager: EnvManagerConfig
    val_batch_size: int
    final_val_batch_size: int
    actor_infer: GenerationConfig
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig
    weights: WeightsConfig

    @property
    def groups_per_step(self) -> int:
        return self.rollout_batch_size // self.train_env_manager.group_size

    @property
    def adapter_settings(self) -> AdapterSettings | None:
        """PEFT settings of the published adapter, as far as an engine needs them; None if merged weights are published."""
        args = self.actor_train.model_args
        if self.actor_infer.max_lora_rank is None:
            return None
        kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
        return {**kind, "r": args.lora_rank, "lora_alpha": args.adapter_alpha, "target_modules": args.lora_targets}

    @property
    def temperature(self) -> float:
        """Sampling temperature of training trajectories, unless their group overrides it."""
        return self.actor_infer.generating_args.temperature

    @property
    def settings(self) -> Settings:
        """Live settings with their configured values."""
        return configured_settings(self)


@dataclass(frozen=True, slots=True)
class LearnerRun:
    """A run as its learner sees it."""

    run_id: str
    lineage: str
    """Distinguishes this run's checkpoints from those of another run in the same folder."""
    output_dir: Path
    config: LearnerRunConfig

    @property
    def model_folder(self) -> Path:
        """Configuration and tokenizer of the policy; its first weights too, unless the policy is new."""
        return self.output_dir / "policy" if self.config.pretrain == "tiny" else Path(self.config.pretrain)

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"


def read_run(redis: Redis, run_id: str) -> LearnerRun:
    """Read a run's record.

    Raises:
        ControlError: there is no such run, or its configuration can't be read.
    """
    raw = cast(dict[bytes, bytes], redis.hgetall(RunKeys(run_id).record))
    if b"config" not in raw:
        raise ControlError(f"there is no run {run_id!r} in this Redis")
    try:
        config = LearnerRunConfig.model_validate_json(raw[b"config"])
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ControlError(f"run {run_id!r} has a configuration that this build can't read: {details}") from error
    folder = raw.get(b"output_dir", b"").decode() or str(config.output_dir)
    return LearnerRun(run_id, _lineage(raw, config), Path(folder).resolve(), config)


FINISHED = "finished"
"""Value of `learner_phase` once all steps are trained and evaluated."""


def over(redis: Redis, run_id: str) -> RunState | None:
    """Return how the run ended, or None while steps remain."""
    fields = redis.hmget(RunKeys(run_id).record, ["state", "learner_phase"])
    state, phase = (each.decode() if each else "" for each in cast(list[bytes | None], fields))
    if phase == FINISHED:
        return RunState.FINISHED
    return RunState(state) if state and RunState(state).over else None


def ends(redis: Redis, run_id: str) -> bool:
    """Return True if the run has ended or should end."""
    wanted = cast(bytes | None, redis.hget(RunKeys(run_id).record, "wanted"))
    return wanted in ENDINGS or over(redis, run_id) is not None


def _lineage(raw: dict[bytes, bytes], config: LearnerConfig) -> str:
    """Return the lineage: a resumed run keeps its creation time and continues the checkpoint's lineage; one that starts
    from a named checkpoint begins a new one."""
    created, attempt = (raw.get(key, b"").decode() for key in (b"created_at", b"attempt"))
    return f"{created}/{attempt}" if isinstance(config.resume_from_checkpoint, Path) else created
