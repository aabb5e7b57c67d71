"""Checks of 4-bit weights under adapters (`load_in_4bit`)."""

from collections.abc import Iterator
from importlib.util import find_spec

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.issue import ConfigIssue

ARGS = "actor_train.model_args"
STRATEGY = "actor_train.strategy_args"
KEY = f"{ARGS}.load_in_4bit"


def check_quantization(config: RunConfig) -> Iterator[ConfigIssue]:
    if not config.actor_train.model_args.load_in_4bit:
        return
    if find_spec("bitsandbytes") is None:
        yield ConfigIssue(KEY, "needs bitsandbytes: pip install 'offbeat[quantization]'")
    strategy, reference = config.actor_train.strategy_args, config.reference
    refers_to_policy = config.needs_reference and reference.model_args.model_name_or_path is None
    rejections = (
        (
            strategy.strategy_name == "fsdp2_train",
            f"{STRATEGY}.strategy_name",
            "fsdp2_train shards weights, which 4-bit ones are not: take deepspeed_train",
        ),
        (
            strategy.zero_stage == 3,
            f"{STRATEGY}.zero_stage",
            "3 shards weights, which 4-bit ones are not: take 2, which shards all that an adapter's training adds",
        ),
        (
            config.warm_start is not None,
            "warm_start",
            f"it trains all weights, which {KEY} freezes in 4 bits: leave one of them out",
        ),
        (
            has_vision(config),
            KEY,
            "a policy with image input is not tested with 4-bit weights: leave it out, or take a model of text",
        ),
        (
            config.router_replay,
            "router_replay",
            f"routing replay is not tested with {KEY}: leave one of them out",
        ),
        (
            refers_to_policy and reference.strategy_args.placement == "service",
            "reference.strategy_args.placement",
            f"a service has the weights of pretrain, and with {KEY} the reference is the policy of 4-bit ones: take learner",
        ),
    )
    yield from (ConfigIssue(key, message) for applies, key, message in rejections if applies)
