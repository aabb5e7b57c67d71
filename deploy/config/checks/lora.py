"""Checks of LoRA adapters, and of their publication."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from offbeat.deploy.config.checks.initial_adapter import check_adapter
from offbeat.deploy.config.checks.quantization import check_quantization
from offbeat.deploy.config.checks.weight_files import weight_shapes
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.issue import ConfigIssue

KEY = "actor_infer.strategy_args.strategy_config.max_lora_rank"
SLOTS_KEY = "actor_infer.strategy_args.strategy_config.max_loras"
TARGET_KEY = "actor_train.model_args.lora_target"
VOCABULARY_LAYERS = ("lm_head", "embed_tokens")
TINY_LAYERS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
"""Linear layers of each of the tiny policy's."""
ROUTERS = ("gate", "router")
"""Names of a mixture's router, beside its experts."""
ROUTER = ".router."
"""Part of the names of routers that are layers of their own."""
LANGUAGE_MODEL = "language_model."
"""Part of the names in multimodal models' language model, which alone takes adapters."""
TRANSPOSED = ("gpt2", "openai-gpt")
"""Families whose layers are Conv1D of transformers."""


def check_shared_engine(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check an engine that serves several runs at once."""
    infer = config.actor_infer
    name = infer.strategy_args.strategy_name
    if infer.engine.max_loras == 1 or name == "hf_infer":  # which has a check of its own
        return
    if name != "vllm":
        yield ConfigIssue(SLOTS_KEY, f"{name} serves one run at a time: leave it out, or take vllm")
    elif infer.engine.max_lora_rank is None:
        yield ConfigIssue(
            SLOTS_KEY, "runs share an engine by their adapters alone: set max_lora_rank, too, or leave it out"
        )
    if infer.on_weight_update == "recompute":
        yield ConfigIssue(
            "actor_infer.on_weight_update",
            f"recompute drops the keys and values of all runs at each update of one: with {SLOTS_KEY} take keep",
        )
    if infer.keep_sessions:
        yield ConfigIssue(
            "actor_infer.keep_sessions",
            f"episodes do not stay in an engine of several runs: leave it out, or {SLOTS_KEY}",
        )


def check_targets(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield targets of adapters that name no layer; the learner ignores them beside others that do."""
    targets = config.actor_train.model_args.lora_targets
    if config.actor_train.model_args.lora_target is None:
        return
    if (family := _family(config.pretrain)) in TRANSPOSED:
        yield ConfigIssue(TARGET_KEY, f"weights of {family} are transposed (Conv1D), and take no adapter: leave it out")
        return
    if isinstance(targets, str):
        return
    layers, experts = _linear_layers(config)
    if not layers:
        return
    unknown = [target for target in targets if target not in VOCABULARY_LAYERS and not _is_named(target, layers)]
    stacked = [target for target in unknown if _is_named(target, experts)]
    known = ", ".join(sorted({layer.rsplit(".", 1)[-1] for layer in layers} - set(VOCABULARY_LAYERS)))
    if stacked:
        yield ConfigIssue(
            TARGET_KEY,
            f"{', '.join(stacked)} are of experts and their router alone, which are stacked in memory and take no adapter: "
            f"take of {known}, or all-linear",
        )
    if absent := [target for target in unknown if target not in stacked]:
        yield ConfigIssue(TARGET_KEY, f"the model has no layer {', '.join(absent)}: take of {known}, or all-linear")


def _family(pretrain: str) -> str:
    """Return a folder's `model_type`; empty if unreadable, which has its own error."""
    try:
        tree = json.loads((Path(pretrain) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(tree.get("model_type", "")) if isinstance(tree, dict) else ""


def _is_named(target: str, layers: Iterable[str]) -> bool:
    return any(f".{layer}".endswith(f".{target}") for layer in layers)


def _linear_layers(config: RunConfig) -> tuple[list[str], list[str]]:
    """Return layers with matrices, and those of experts and routers, as files name them; none if unreadable."""
    if config.pretrain == "tiny":
        numbers = range(config.tiny.num_hidden_layers)
        return [f"model.layers.{number}.{name}" for number in numbers for name in TINY_LAYERS], []
    try:
        shapes = list(weight_shapes(config.pretrain))
    except (OSError, ValueError):
        return [], []  # an unreadable model has its own error
    mixtures = {name.partition(".experts.")[0] for name, _ in shapes if ".experts." in name}
    routers = {f"{mixture}.{name}.weight" for mixture in mixtures for name in ROUTERS}
    others = {name for name, _ in shapes if ".experts." in name or name in routers or ROUTER in name}
    layers = [name for name, shape in shapes if name.endswith(".weight") and len(shape) == 2 and name not in others]
    layers = [name for name in layers if LANGUAGE_MODEL in name] or layers
    return [name.removesuffix(".weight") for name in layers], [name.removesuffix(".weight") for name in others]


def check_lora(config: RunConfig) -> Iterator[ConfigIssue]:
    yield from check_shared_engine(config)
    yield from check_adapter(config)
    yield from check_quantization(config)
    max_rank, args = config.actor_infer.engine.max_lora_rank, config.actor_train.model_args
    if max_rank is None:
        return
    if not args.has_adapters:
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
            TARGET_KEY,
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
