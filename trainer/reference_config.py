"""Models that are asked and never trained: how they lie on the learner's processes."""

from typing import Literal

from pydantic import field_validator

from envs.config import Config

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
