"""Checks of the engine by transformers (`hf_infer`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError
from offbeat.deploy.run_setup import load_architecture
from offbeat.services.generation.config import HF_ARGUMENTS, arguments_beyond_hf
from offbeat.services.generation.hf.limits import architecture_problem
from offbeat.services.generation.kv_cache import ITEMSIZE, bytes_per_token, cache_problem
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

NAME = "actor_infer.strategy_args.strategy_name"


def check_hf_infer(config: RunConfig) -> Iterator[ConfigIssue]:
    infer = config.actor_infer
    if infer.strategy_args.strategy_name != "hf_infer":
        return
    for name in arguments_beyond_hf(infer.engine):
        yield ConfigIssue(
            f"{ENGINE}.{name}", f"hf_infer has {', '.join(HF_ARGUMENTS)} alone: leave {name} out, or take vllm"
        )
    if infer.device == "cuda":
        yield ConfigIssue("actor_infer.device", "hf_infer computes on a CPU: take cpu, or vllm on GPUs")
    if has_vision(config):
        yield ConfigIssue(NAME, "the policy has image input, and hf_infer reads none: take vllm")
    else:
        yield from _check_model(config)


def _check_model(config: RunConfig) -> Iterator[ConfigIssue]:
    try:
        architecture = load_architecture(config)
        cache_issues = list(check_cache(config, architecture))
    except (OSError, ValueError, KeyError, MissingWordsError):
        return  # an unreadable model has its own error
    if problem := architecture_problem(architecture):
        yield ConfigIssue(NAME, f"{config.pretrain}: {problem}: take vllm")
    yield from cache_issues


def check_cache(config: RunConfig, architecture: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield an issue if keys and values of one sequence exceed the cache; raises `KeyError` for a missing key."""
    infer = config.actor_infer
    token_bytes = bytes_per_token(architecture, ITEMSIZE[infer.model_args.dtype or "float32"])
    context = infer.engine.max_model_len or config.sequence_length
    if problem := cache_problem(infer.kv_cache_gib, context, token_bytes):
        yield ConfigIssue("actor_infer.kv_cache_gib", problem)
