"""Algorithms that a learner's engine can't carry out: with the key's path and what would be right."""

from collections.abc import Iterator

from trainer.algorithm_checks import Complaint
from trainer.config import LearnerConfig


def learner_complaints(config: LearnerConfig) -> Iterator[Complaint]:
    """Every impossible combination of an algorithm with the engine and the model arguments of its learner."""
    train = config.actor_train
    adapts, sharded = train.model_args.lora_target is not None, train.strategy_args.zero_stage == 3
    if adapts and config.ref_model_sync_steps is not None:
        yield Complaint(
            "ref_model_sync_steps",
            "with lora_target the reference is the policy without its adapters, which stays: leave it out",
        )
    if adapts and sharded and config.kl_is_full:
        yield Complaint(
            "kl_loss_type",
            "full reads the reference's hidden states, and with lora_target and zero_stage 3 no rank holds them whole: take "
            "k3, or zero_stage 2",
        )
