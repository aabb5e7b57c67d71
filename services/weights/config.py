"""What the weight-sync broker can be told (`weights` in a run's YAML)."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.envs.config import Config


class WeightsConfig(Config):
    """How new weights travel from the learner to the replicas."""

    transport: Literal["shm", "fs", "ipc", "nccl"] = "shm"
    """`shm`: shared memory, learner and replicas on one host. `fs`: any fsspec URL, any host. `ipc` and `nccl`: vLLM's own
    engines, GPUs only."""
    url: str | None = None
    """Where `fs` puts versions: a folder, `s3://...`, `gs://...`; None is `weights/` in the run's folder."""
    keep_versions: int = Field(default=2, ge=1)
    """Newest versions that stay; older ones are collected."""
    fetch_timeout_s: float = Field(default=300.0, gt=0)
    """How long a replica reads a version, and a second more for each 100 MB, before it gives up for now, and goes on with
    the one that it serves. What hangs is passed over until it comes back; newer versions are tried. Loading has a limit of
    its own, `actor_infer.update_timeout_s`."""
    dtype: Literal["as_trained", "bfloat16"] = "as_trained"
    """What the weights are rounded to before they travel; engines of another `dtype` convert them when they load."""
    anchor_every: int = Field(default=1, ge=1)
    """One version in so many is whole; those between hold, compressed, the elements that differ from it. 1: all are whole.
    Worth it where bytes are dear (`fs` to another host), weights are bfloat16 and steps are small."""

    @model_validator(mode="after")
    def _files_alone_have_anchors(self) -> "WeightsConfig":
        if self.anchor_every > 1 and self.transport not in ("shm", "fs"):
            raise ValueError(f"anchor_every {self.anchor_every} needs transport shm or fs, not {self.transport}")
        return self
