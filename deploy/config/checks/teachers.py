"""Checks of frozen models that vLLM computes."""

from collections.abc import Iterator

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.issue import ConfigIssue


def check_teachers(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield frozen models that vLLM can't compute."""
    strategies = {"reference": config.reference.strategy_args}
    strategies |= {f"teacher.{name}": teacher.strategy_args for name, teacher in config.teacher.items()}
    for name, strategy in strategies.items():
        if strategy.strategy_name != "vllm":
            continue
        reasons = (
            (name == "reference" or config.pipeline != "distill", "vllm is for teachers of pipeline: distill"),
            (not config.distill.logits_topk, "vllm gives the most probable tokens: set distill.logits_topk above 0"),
            (config.distill.teacher_temperature != 1, "vllm gives distributions at distill.teacher_temperature 1"),
            (config.actor_train.model_args.shared_prefix, "vllm scores whole sequences: leave shared_prefix out"),
            (has_vision(config), "vllm scores text alone"),
        )
        message = next((text for applies, text in reasons if applies), None)
        if message is not None:
            yield ConfigIssue(f"{name}.strategy_args.strategy_name", f"{message}; or take hf_infer")
