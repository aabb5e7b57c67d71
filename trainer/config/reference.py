"""Models that are asked and never trained: how they lie on the learner's processes.

Who teaches a policy that is distilled on-policy.
"""

from typing import Literal

from pydantic import Field, field_validator

from offbeat.envs.config import Config

ELSEWHERE = {
    "megatron_infer": "no model is cut by tensors or pipeline stages",
    "fsdp2_infer": "deepspeed_infer does the same",
    "vllm": "a frozen model's logprobs must come from the trainer's own numerics",
    "sglang": "a frozen model's logprobs must come from the trainer's own numerics",
}
"""Strategies of ROLL, and why there are none here."""


class InferStrategyArgs(Config):
    """ROLL's `strategy_args` of a model that is not trained."""

    strategy_name: Literal["hf_infer", "deepspeed_infer"] = "hf_infer"
    """`hf_infer`: plain transformers; every process holds the model whole. `deepspeed_infer`: every process holds a share of
    its weights (ZeRO-3) and layers are made whole one by one, which saves memory and costs communication. Either way each
    process computes its share of a batch."""

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_built(cls, value: object) -> object:
        """Raises ValueError with what does the same here."""
        if isinstance(value, str) and value in ELSEWHERE:
            raise ValueError(f"{value} is not built ({ELSEWHERE[value]}): take hf_infer or deepspeed_infer")
        return value


class ReferenceConfig(Config):
    """ROLL's `reference`: what KL penalties keep the policy close to."""

    strategy_args: InferStrategyArgs = InferStrategyArgs()


class TeacherConfig(Config):
    """One of ROLL's `teacher`s: a model that is asked how likely it finds each token that the policy sampled."""

    pretrain: str = Field(min_length=1)
    """A local Hugging Face folder with the policy's tokenizer."""
    tag_included: tuple[str, ...] = ()
    """Tags of `custom_envs` that it teaches; none means all."""
    opd_kl_coef: float = Field(default=1.0, gt=0)
    """What its KL counts."""
    strategy_args: InferStrategyArgs = InferStrategyArgs()
