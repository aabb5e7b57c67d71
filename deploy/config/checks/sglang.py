"""Checks of SGLang's engine (`sglang`)."""

from collections.abc import Iterator

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

FILE_TRANSPORTS = ("shm", "fs")


def check_sglang(config: RunConfig) -> Iterator[ConfigIssue]:
    infer = config.actor_infer
    if infer.strategy_args.strategy_name != "sglang":
        return
    if infer.device == "cpu":
        yield ConfigIssue("actor_infer.device", "sglang samples on GPUs: take cuda, or vllm or hf_infer on CPUs")
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
    if has_vision(config):
        yield ConfigIssue(
            "actor_infer.strategy_args.strategy_name", "the policy has image input, and sglang is given text: take vllm"
        )
