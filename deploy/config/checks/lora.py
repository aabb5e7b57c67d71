"""Checks of published LoRA adapters."""

from collections.abc import Iterator

from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.issue import ConfigIssue

KEY = "actor_infer.strategy_args.strategy_config.max_lora_rank"
VOCABULARY_LAYERS = ("lm_head", "embed_tokens")


def check_lora(config: RunConfig) -> Iterator[ConfigIssue]:
    max_rank, args = config.actor_infer.engine.max_lora_rank, config.actor_train.model_args
    if max_rank is None:
        return
    if args.lora_target is None:
        yield ConfigIssue(
            KEY, "all weights are trained and there is no adapter to serve: set actor_train.model_args.lora_target"
        )
        return
    infer = config.actor_infer
    if (infer.device, infer.strategy_args.strategy_name, infer.model_args.dtype) == ("cuda", "vllm", "float32"):
        yield ConfigIssue(
            "actor_infer.model_args.dtype",
            f"vLLM's adapters on GPUs are of bfloat16 or float16, not float32: take one of them, or unset {KEY}",
        )
    if max_rank < args.lora_rank:
        yield ConfigIssue(
            KEY,
            f"{max_rank} is below actor_train.model_args.lora_rank {args.lora_rank}: take {args.lora_rank}",
        )
    if layers := [part for part in VOCABULARY_LAYERS if part in args.lora_targets]:
        yield ConfigIssue(
            "actor_train.model_args.lora_target",
            f"engines can't serve adapters of {', '.join(layers)}: leave it out, or unset {KEY}",
        )
    if config.weights.transport not in ("shm", "fs"):
        yield ConfigIssue(
            "weights.transport",
            f"{config.weights.transport} transfers full weights between GPUs: with {KEY} take shm, or fs across hosts",
        )
    if config.weights.anchor_every > 1:
        yield ConfigIssue(
            "weights.anchor_every",
            f"with {KEY} only small adapters are sent: leave it out",
        )
