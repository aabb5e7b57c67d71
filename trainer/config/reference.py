"""Frozen models: reference and teachers."""

from typing import Literal

from pydantic import Field, field_validator

from offbeat.envs.config import Config

UNSUPPORTED = {
    "megatron_infer": "there is no tensor or pipeline parallelism",
    "fsdp2_infer": "deepspeed_infer does the same",
    "vllm": "a frozen model's logprobs must come from the trainer's own numerics",
    "sglang": "a frozen model's logprobs must come from the trainer's own numerics",
}
"""ROLL's unsupported strategies, with reasons."""


class InferStrategyArgs(Config):
    """Frozen model's engine; ROLL's `strategy_args`."""

    strategy_name: Literal["hf_infer", "deepspeed_infer"] = "hf_infer"
    """`hf_infer`: transformers, a full copy per process. `deepspeed_infer`: weights sharded (ZeRO-3) and gathered by
    layer. Both split batches over processes.
    """

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if isinstance(value, str) and value in UNSUPPORTED:
            raise ValueError(f"{value} is not supported ({UNSUPPORTED[value]}): take hf_infer or deepspeed_infer")
        return value


class ReferenceConfig(Config):
    """Reference of KL penalties; ROLL's `reference`."""

    strategy_args: InferStrategyArgs = InferStrategyArgs()


class TeacherConfig(Config):
    """Teacher of sampled tokens; one of ROLL's `teacher`."""

    pretrain: str = Field(min_length=1)
    """Local Hugging Face folder, with the policy's tokenizer."""
    tag_included: tuple[str, ...] = ()
    """Tags of `custom_envs` to teach; empty for all."""
    opd_kl_coef: float = Field(default=1.0, gt=0)
    """Weight of this teacher's KL."""
    strategy_args: InferStrategyArgs = InferStrategyArgs()
