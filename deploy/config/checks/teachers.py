"""Checks of frozen models that vLLM computes, and of their tokenizers."""

from collections.abc import Iterator
from pathlib import Path

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import read_tiny_vocabulary
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.models.tokenizer_check import check_same_tokens


def check_teachers(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield frozen models that vLLM can't compute, and tiny teachers of other policies."""
    for name, teacher in config.teacher.items():
        if teacher.model_args.is_tiny and config.pretrain != "tiny":
            path = f"teacher.{name}.model_args.model_name_or_path"
            yield ConfigIssue(path, "tiny: for pretrain: tiny alone, whose tokenizer it has; set it to a local folder")
    strategies = {"reference": config.reference.strategy_args}
    strategies |= {f"teacher.{name}": teacher.strategy_args for name, teacher in config.teacher.items()}
    tiny = {f"teacher.{name}" for name, teacher in config.teacher.items() if teacher.model_args.is_tiny}
    for name, strategy in strategies.items():
        if strategy.strategy_name != "vllm":
            continue
        reasons = (
            (name == "reference" or config.pipeline != "distill", "vllm is for teachers of pipeline: distill"),
            (not config.distill.logits_topk, "vllm gives the most probable tokens: set distill.logits_topk above 0"),
            (config.distill.teacher_temperature != 1, "vllm gives distributions at distill.teacher_temperature 1"),
            (config.actor_train.model_args.shared_prefix, "vllm scores whole sequences: leave shared_prefix out"),
            (has_vision(config), "vllm scores text alone"),
            (name in tiny, "vllm loads weights, and a tiny teacher has none"),
        )
        message = next((text for applies, text in reasons if applies), None)
        if message is not None:
            yield ConfigIssue(f"{name}.strategy_args.strategy_name", f"{message}; or take hf_infer")


def check_tokenizers(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield teachers whose tokens are not the policy's."""
    for name, teacher in config.teacher.items():
        path, folder = f"teacher.{name}.model_args.model_name_or_path", Path(teacher.model_args.model_name_or_path)
        if teacher.model_args.is_tiny or not (folder / "tokenizer.json").is_file():
            continue  # reported where the folder is read
        if (Path(config.pretrain) / "tokenizer.json").is_file():
            try:
                check_same_tokens(Path(config.pretrain), folder, path)
            except ValueError as error:
                yield ConfigIssue(path, str(error).removeprefix(f"{path}: "))
        elif config.pretrain == "tiny" and config.pipeline == "distill" and not read_tiny_vocabulary(folder):
            yield ConfigIssue(
                path,
                f"{folder} has not the tokenizer of a tiny policy: set pretrain to a model of the teacher's family, or "
                "take a teacher that was a tiny policy",
            )
