"""Checks of 4-bit weights under adapters (`load_in_4bit`)."""

import json
from collections.abc import Iterator
from importlib.util import find_spec

from offbeat.deploy.config.checks.model import find_checkpoint, has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.adapter_settings import ADAPTER_CONFIG, QUANTIZATION_CONFIG
from offbeat.trainer.config.issue import ConfigIssue

ARGS = "actor_train.model_args"
STRATEGY = "actor_train.strategy_args"
KEY = f"{ARGS}.load_in_4bit"
ADAPTER = "adapter"
"""Folder of a checkpoint."""
KEYS = {
    "load_in_4bit": "load_in_4bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
}
"""Keys -> those of `BitsAndBytesConfig`."""


def check_quantization(config: RunConfig) -> Iterator[ConfigIssue]:
    yield from _check_resumed(config)
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


def _check_resumed(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield another base than the checkpoint's, on which its adapters are another policy."""
    checkpoint, args = find_checkpoint(config), config.actor_train.model_args
    if checkpoint is None or not args.has_adapters or not (checkpoint / ADAPTER / ADAPTER_CONFIG).is_file():
        return
    path = checkpoint / ADAPTER / QUANTIZATION_CONFIG
    theirs = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for key, name in KEYS.items():
        own = getattr(args, key) if args.load_in_4bit else None
        if own != theirs.get(name):
            shown = [str(False if each is None else each).lower() for each in (own, theirs.get(name))]
            yield ConfigIssue(
                f"{ARGS}.{key}",
                f"{shown[0]}, and the adapters of the checkpoint {checkpoint} were trained with {shown[1]}: take that",
            )
            return
