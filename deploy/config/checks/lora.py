"""What stands in the way of publishing an adapter by itself: with the key's path and what would be right."""

from collections.abc import Iterator

from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.issue import ConfigIssue

KEY = "actor_infer.max_lora_rank"
VOCABULARY = ("lm_head", "embed_tokens")


def check_lora(config: RunConfig) -> Iterator[ConfigIssue]:
    """Every impossible combination of `actor_infer.max_lora_rank` with the run around it."""
    room, args = config.actor_infer.max_lora_rank, config.actor_train.model_args
    if room is None:
        return
    if args.lora_target is None:
        yield ConfigIssue(
            KEY, "all weights are trained, there is no adapter to serve: set actor_train.model_args.lora_target"
        )
        return
    if room < args.lora_rank:
        yield ConfigIssue(
            KEY,
            f"{room} is below actor_train.model_args.lora_rank {args.lora_rank}: take {args.lora_rank}",
        )
    if named := [part for part in VOCABULARY if part in args.lora_targets]:
        yield ConfigIssue(
            "actor_train.model_args.lora_target",
            f"engines serve no adapter of {', '.join(named)}: leave it out, or publish merged weights (without {KEY})",
        )
    if config.weights.transport not in ("shm", "fs"):
        yield ConfigIssue(
            "weights.transport",
            f"{config.weights.transport} moves whole weights between GPUs: with {KEY} take shm, or fs across hosts",
        )
    if config.weights.anchor_every > 1:
        yield ConfigIssue(
            "weights.anchor_every", f"with {KEY} the base is sent once and adapters are small: leave it out"
        )
