"""What the weight-sync broker can be told (`weights` in a run's YAML)."""

from typing import Literal

from pydantic import Field

from envs.config import Config


class WeightsConfig(Config):
    """How new weights travel from the learner to the replicas."""

    transport: Literal["shm", "fs", "ipc", "nccl"] = "shm"
    """`shm`: shared memory, learner and replicas on one host. `fs`: any fsspec URL, any host. `ipc` and `nccl`: vLLM's own
    engines, GPUs only."""
    url: str | None = None
    """Where `fs` puts versions: a folder, `s3://...`, `gs://...`; None is `weights/` in the run's folder."""
    keep_versions: int = Field(default=2, ge=1)
    """Newest versions that stay; older ones are collected."""
