"""Configuration of the weight-sync broker (`weights` in a run's YAML)."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from offbeat.envs.config import Config


class WeightsConfig(Config):
    """Transport of weights from the learner to the replicas."""

    transport: Literal["shm", "fs", "ipc", "nccl"] = "shm"
    """`shm`: shared memory, learner and replicas on one host. `fs`: any fsspec URL, any host. `ipc` and `nccl`: vLLM's own
    engines, GPUs only. Left out, `ipc` where a run's one engine is on the learner's one GPU."""
    url: str | None = None
    """Location of `fs` versions: a folder, `s3://...`, `gs://...`; None is `weights/` in the run's folder."""
    keep_versions: int = Field(default=2, ge=1)
    """Newest versions to keep."""
    fetch_timeout_s: float = Field(default=300.0, gt=0)
    """Time to read a version, plus one second per 100 MB; a replica skips a version until its read returns. Loading is
    limited by `actor_infer.update_timeout_s`.
    """
    dtype: Literal["as_trained", "bfloat16"] = "as_trained"
    """Type of published matrices; engines convert them. Biases and norms stay as trained."""
    anchor_every: int = Field(default=1, ge=1)
    """Every n-th version is complete; others are compressed differences to it. Useful with bfloat16 weights, small
    steps and slow storage.
    """

    @field_validator("url")
    @classmethod
    def _is_of_every_process(cls, value: str | None) -> str | None:
        """Make a folder absolute: learner, replicas and broker may have other working folders."""
        return str(Path(value).absolute()) if value and "://" not in value else value

    @model_validator(mode="after")
    def _files_alone_have_anchors(self) -> "WeightsConfig":
        if self.anchor_every > 1 and self.transport not in ("shm", "fs"):
            raise ValueError(f"anchor_every {self.anchor_every} needs transport shm or fs, not {self.transport}")
        return self
