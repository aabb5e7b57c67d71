from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from offbeat.envs.config import Config
from offbeat.services.ports import LOOPBACK_NAMES

TinkerEngine = Literal["hf_infer", "vllm"]


class TinkerConfig(Config):
    """`offbeat tinker`: models of clients on the policy's base model."""

    host: str = "127.0.0.1"
    """Address to listen on; except loopback, it needs `keys_file`."""
    port: int = Field(default=8765, ge=0, le=65535)
    """0: any free one."""
    model_name: str | None = Field(default=None, min_length=1)
    """Name of the base model for clients; None: `pretrain`, or its folder's name."""
    engine: TinkerEngine | None = None
    """What samples. None: `hf_infer` on a CPU, `vllm` on GPUs."""
    keys_file: Path | None = None
    """File of API keys, one `tml-...` per line; each sees its own models. None: any key, on this machine."""
    max_lora_rank: int = Field(default=64, ge=1, le=512)
    max_models: int = Field(default=16, ge=1)
    """Models in the learner's memory; others wait on disk."""
    max_adapters: int = Field(default=16, ge=1)
    """Adapters in the engine's memory; others are reloaded for sampling."""
    shared_pass_tokens: int = Field(default=0, ge=0)
    """Tokens up to which gradients of several models share a pass of the base model, with float rounding that depends
    on the others' lengths. 0: each model has passes of its own, and its weights are independent of others to the bit.
    """
    max_queued_commands: int = Field(default=256, ge=1)
    """Unapplied commands of a model; further ones are refused for now."""
    max_queued_mib: int = Field(default=256, ge=1)
    """Memory of a key's unapplied commands."""
    max_samples: int = Field(default=1024, ge=1)
    """Sequences of a key in progress."""
    max_models_per_key: int = Field(default=64, ge=1)
    """Models of a key's sessions that have not ended."""
    max_saved_gib: float = Field(default=64.0, gt=0)
    """Disk space of a key's checkpoints; further ones are refused."""
    session_timeout_s: float = Field(default=86400.0, gt=0)
    """Time without a heartbeat after which a session ends. Its models are deleted, their checkpoints stay."""

    def engine_on(self, device: str) -> TinkerEngine:
        """Return the engine. device: `actor_infer.device`"""
        return self.engine or ("hf_infer" if device == "cpu" else "vllm")

    @model_validator(mode="after")
    def _is_private(self) -> "TinkerConfig":
        if self.host not in LOOPBACK_NAMES and self.keys_file is None:
            raise ValueError(f"host {self.host} is for other machines, too: set keys_file, or take 127.0.0.1")
        return self
