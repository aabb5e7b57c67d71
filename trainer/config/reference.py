"""Frozen models of the learner: the reference and the teachers of on-policy distillation."""

from typing import Literal

from pydantic import Field, field_validator

from offbeat.envs.config import Config

UNSUPPORTED = {
    "megatron_infer": "there is no tensor or pipeline parallelism",
    "fsdp2_infer": "deepspeed_infer does the same",
    "vllm": "a frozen model's logprobs must come from the trainer's own numerics",
    "sglang": "a frozen model's logprobs must come from the trainer's own numerics",
}
"""Unsupported strategies of ROLL, with the reason."""


class InferStrategyArgs(Config):
    """Engine of a frozen model; ROLL's `strategy_args`."""

    strategy_name: Literal["hf_infer", "deepspeed_infer"] = "hf_infer"
    """`hf_infer`: transformers, with a full copy of the model per process. `deepspeed_infer`: weights sharded over processes
    (ZeRO-3) and gathered layer by layer, which saves memory and costs communication. Either way each process computes its
    shard of a batch."""

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if isinstance(value, str) and value in UNSUPPORTED:
            raise ValueError(f"{value} is not supported ({UNSUPPORTED[value]}): take hf_infer or deepspeed_infer")
        return value


class ReferenceConfig(Config):
    """Model that KL penalties keep the policy close to; ROLL's `reference`."""

    strategy_args: InferStrategyArgs = InferStrategyArgs()


class TeacherConfig(Config):
    """Teacher of on-policy distillation, which scores the tokens that the policy sampled; one of ROLL's `teacher`."""

    pretrain: str = Field(min_length=1)
    """Local Hugging Face folder. Its tokenizer must equal the policy's."""
    tag_included: tuple[str, ...] = ()
    """Tags of `custom_envs` to teach; empty for all."""
    opd_kl_coef: float = Field(default=1.0, gt=0)
    """Weight of the KL to this teacher."""
    strategy_args: InferStrategyArgs = InferStrategyArgs()
