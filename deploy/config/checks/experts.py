"""Checks of mixtures of experts: their adapters, and rollout routing replay (`router_replay`)."""

from collections.abc import Iterator

from offbeat.deploy.config.checks.model import count_experts, has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError
from offbeat.deploy.run_setup import load_architecture
from offbeat.services.generation.config import ROUTED_EXPERTS
from offbeat.services.generation.kv_cache import text_config
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.router_replay import REPLAYED_FAMILIES

KEY = "router_replay"
EXPERTS = f"{ENGINE}.{ROUTED_EXPERTS}"


def check_experts(config: RunConfig) -> Iterator[ConfigIssue]:
    yield from _check_adapters(config)
    yield from _check_router_replay(config)


def check_returned_experts(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield what keeps an engine of the deploy file from returning experts, if it is to."""
    if config.actor_infer.returns_routing:
        yield from _check_engine(config, EXPERTS)
        yield from _check_mixture(config, EXPERTS)


def _check_adapters(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield adapters of a mixture of experts that vLLM would serve on a CPU."""
    infer = config.actor_infer
    is_vllm = config.uses_engine and infer.strategy_args.strategy_name == "vllm"
    if not is_vllm or infer.device != "cpu" or infer.engine.max_lora_rank is None:
        return
    if (number := count_experts(config)) > 1:
        yield ConfigIssue(
            f"{ENGINE}.max_lora_rank",
            f"the model has {number} experts, whose adapters vLLM serves on GPUs alone: leave max_lora_rank out",
        )


def _check_router_replay(config: RunConfig) -> Iterator[ConfigIssue]:
    if not config.router_replay:
        if config.actor_infer.returns_routing:
            yield ConfigIssue(
                EXPERTS,
                f"nothing reads the experts: set {KEY}=true, or leave {ROUTED_EXPERTS} out",
            )
        return
    if config.reads_data:
        yield ConfigIssue(
            KEY, f"pipeline {config.pipeline} trains on rows, for which no engine chose experts: leave it out"
        )
        return
    yield from _check_engine(config, KEY)
    yield from _check_learner(config)
    yield from _check_model(config)


def _check_engine(config: RunConfig, key: str) -> Iterator[ConfigIssue]:
    """Yield what keeps an engine from returning experts. key: asks for them."""
    infer = config.actor_infer
    if (name := infer.strategy_args.strategy_name) != "vllm":
        yield ConfigIssue(
            key, f"{name} does not return the experts that it chose: set actor_infer.strategy_args.strategy_name=vllm"
        )
        return
    if not infer.returns_routing:
        yield ConfigIssue(EXPERTS, f"{key} needs the experts: leave {ROUTED_EXPERTS} out")
    if not infer.engine.enable_prefix_caching:
        yield ConfigIssue(
            f"{ENGINE}.enable_prefix_caching",
            f"vLLM returns experts with prefix caching alone, which {key} needs: set it true",
        )
    if infer.engine.max_loras > 1:
        yield ConfigIssue(
            f"{ENGINE}.max_loras",
            f"an engine of several runs returns no experts, which {key} needs: leave max_loras out",
        )
    if infer.engine.pipeline_parallel_size > 1:
        yield ConfigIssue(
            f"{ENGINE}.pipeline_parallel_size",
            f"vLLM returns no experts of a pipeline's stages, which {key} needs: take tensor_parallel_size",
        )
    if infer.device == "cpu" and not infer.enforces_eager:
        yield ConfigIssue(
            f"{ENGINE}.enforce_eager", f"a compiled model on a CPU records no experts, which {key} needs: leave it out"
        )


def _check_learner(config: RunConfig) -> Iterator[ConfigIssue]:
    strategy = config.actor_train.strategy_args
    if strategy.strategy_name == "megatron_train":
        yield ConfigIssue(
            KEY,
            "megatron_train's routers choose by themselves: set actor_train.strategy_args.strategy_name=deepspeed_train or "
            "fsdp2_train",
        )
    for key in ("tp_size", "pp_size", "ulysses_size"):
        if (size := getattr(strategy, key)) > 1:
            yield ConfigIssue(
                f"actor_train.strategy_args.{key}",
                f"{KEY} replays experts in whole models and micro-batches alone, not with {key} {size}: leave {key} out",
            )


def _check_mixture(config: RunConfig, key: str) -> Iterator[ConfigIssue]:
    """Yield a dense model. key: asks for experts."""
    if count_experts(config) < 2:
        yield ConfigIssue(key, f"the model ({config.pretrain}) has no experts to choose among: leave it out")


def _check_model(config: RunConfig) -> Iterator[ConfigIssue]:
    if dense := list(_check_mixture(config, KEY)):
        yield from dense
        return
    try:
        name = str(text_config(load_architecture(config)).get("model_type"))
    except (OSError, ValueError, MissingWordsError):
        return  # an unreadable model has its own error
    if name not in REPLAYED_FAMILIES:
        yield ConfigIssue(
            KEY,
            f"routers of {name} can't be told what to choose, only those of {', '.join(REPLAYED_FAMILIES)}: leave it out",
        )
    if has_vision(config):
        yield ConfigIssue(KEY, "it is for text policies, and this one has image input: leave it out")
