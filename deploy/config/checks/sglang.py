"""Checks of SGLang's engine (`sglang`)."""

import shutil
from collections.abc import Iterator

from offbeat.deploy.config.checks.agents import import_problem
from offbeat.deploy.config.checks.hf_infer import check_cache
from offbeat.deploy.config.checks.model import count_experts, has_vision
from offbeat.deploy.config.checks.sampling import sampling_key
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError
from offbeat.deploy.run_setup import load_architecture
from offbeat.services.generation.config import sampling_mask_limit
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

FILE_TRANSPORTS = ("shm", "fs")
PYTHON = "actor_infer.strategy_args.python"


def check_sglang(config: RunConfig) -> Iterator[ConfigIssue]:
    infer = config.actor_infer
    python = infer.strategy_args.python
    if infer.strategy_args.strategy_name != "sglang":
        if python:
            yield ConfigIssue(PYTHON, "another Python is for sglang alone: leave python out")
        return
    if python and shutil.which(python) is None:
        yield ConfigIssue(PYTHON, f"there is no program {python!r} on the PATH")
    elif python and (problem := import_problem(python, "sglang")):
        yield ConfigIssue(PYTHON, f"{python} {problem}")
    if infer.device == "cpu":
        yield from _check_cache(config)
    if config.weights.transport not in FILE_TRANSPORTS:
        yield ConfigIssue(
            "weights.transport",
            f"{config.weights.transport} is of vLLM's engines, and sglang reads files: take shm or fs",
        )
    if infer.engine.max_lora_rank is not None:
        yield ConfigIssue(
            f"{ENGINE}.max_lora_rank", "sglang is given merged weights: leave max_lora_rank out, or take vllm"
        )
    if infer.keep_sessions:
        yield ConfigIssue(
            "actor_infer.keep_sessions", "sessions stay in vLLM alone: leave keep_sessions out, or take vllm"
        )
    if (number := count_experts(config)) > 1:
        yield ConfigIssue(
            "actor_infer.strategy_args.strategy_name",
            f"the model has {number} experts, whose names in sglang are not the learner's: take vllm on "
            "GPUs, or hf_infer on a CPU",
        )
    if has_vision(config):
        yield ConfigIssue(
            "actor_infer.strategy_args.strategy_name", "the policy has image input, and sglang is given text: take vllm"
        )


def check_sglang_updates_and_cuts(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield what earlier builds accepted, with wrong versions or logprobs."""
    infer = config.actor_infer
    if infer.strategy_args.strategy_name != "sglang":
        return
    if infer.engine.pipeline_parallel_size > 1:
        yield ConfigIssue(
            f"{ENGINE}.pipeline_parallel_size",
            "sglang does not pause a pipeline for new weights: take tensor_parallel_size, or vllm",
        )
    args, limit = infer.generating_args, sampling_mask_limit(infer.engine)
    if (args.top_p == 1 and args.top_k < 1) or 0 < args.top_k < limit:
        return
    key = "top_k" if args.top_k > 0 else "top_p"
    yield ConfigIssue(
        sampling_key(config, key),
        f"sglang records logprobs of the tokens kept only where top_k is set: take a top_k below {limit} "
        f"({ENGINE}.sampling_mask_max_tokens), such as 50, as each sampled token comes with the ids of those kept, or vllm"
        if limit
        else "sglang records logprobs of the tokens kept, but not with speculative_algorithm or sampling_backend: ascend: "
        f"leave these or {key} out, or take vllm",
    )


def _check_cache(config: RunConfig) -> Iterator[ConfigIssue]:
    try:
        yield from check_cache(config, load_architecture(config))
    except (OSError, ValueError, KeyError, MissingWordsError):
        return  # an unreadable model has its own error
