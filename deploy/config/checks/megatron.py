"""Checks of Megatron's training engine (`megatron_train`)."""

from collections.abc import Iterator
from importlib.util import find_spec

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError
from offbeat.deploy.run_setup import load_architecture
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.megatron_model import find_megatron_obstacle

NAME = "actor_train.strategy_args.strategy_name"
ARGS = "actor_train.model_args"
WHOLE = "it trains all weights of a language model in one process and float32"


def check_megatron(config: RunConfig) -> Iterator[ConfigIssue]:
    train, args = config.actor_train, config.actor_train.model_args
    if train.strategy_args.strategy_name != "megatron_train":
        return
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        yield ConfigIssue(NAME, "megatron_train needs megatron-core: pip install 'offbeat[megatron]'")
    rejections = (
        (train.num_processes > 1, "actor_train.num_processes", "take 1, or fsdp2_train, whose tp_size splits layers"),
        (args.dtype != "float32", f"{ARGS}.dtype", "take float32, or fsdp2_train"),
        (args.lora_target is not None, f"{ARGS}.lora_target", "leave it out, or take deepspeed_train"),
        (
            not args.disable_gradient_checkpointing,
            f"{ARGS}.disable_gradient_checkpointing",
            "take true, or fsdp2_train",
        ),
        (args.attn_implementation != "auto", f"{ARGS}.attn_implementation", "take auto, or fsdp2_train"),
        (config.adv_estimator == "gae", "adv_estimator", "take one without a critic, as grpo, or deepspeed_train"),
        (config.trains_reward_model, "pipeline", "take deepspeed_train for reward_model"),
    )
    for applies, path, advice in rejections:
        if applies:
            yield ConfigIssue(path, f"not with megatron_train, as {WHOLE}: {advice}")
    yield from _check_model(config)


def _check_model(config: RunConfig) -> Iterator[ConfigIssue]:
    try:
        architecture = load_architecture(config)
    except (OSError, ValueError, MissingWordsError):
        return  # an unreadable model has its own error
    if obstacle := find_megatron_obstacle(architecture):
        yield ConfigIssue(NAME, f"megatron_train: {obstacle}: take deepspeed_train")
