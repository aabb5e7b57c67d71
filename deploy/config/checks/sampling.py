"""Checks of sampling: recorded logprobs must be the trainer's."""

from collections.abc import Iterator

from offbeat.deploy.config.run import RunConfig
from offbeat.services.live_settings import MIN_TEMPERATURE
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.estimators import WITHOUT_RATIO
from offbeat.trainer.config.issue import ConfigIssue

PROCESSORS = ("logits_processors", "logprobs_mode", "generation_config", "override_generation_config")
"""vLLM's arguments that change the sampled distribution or its record."""

DTYPE = "actor_infer.model_args.dtype"
OWN_ARGUMENTS = {
    "vllm": {"dtype": DTYPE, "seed": "seed", "model": "pretrain", "skip_tokenizer_init": "", "scheduler_cls": ""},
    "sglang": {
        "dtype": DTYPE,
        "random_seed": "seed",
        "model_path": "pretrain",
        "skip_tokenizer_init": "",
        "weight_version": "",
        "context_length": f"{ENGINE}.max_model_len",
        "max_running_requests": f"{ENGINE}.max_num_seqs",
        "mem_fraction_static": f"{ENGINE}.gpu_memory_utilization",
        "disable_radix_cache": f"{ENGINE}.enable_prefix_caching",
    },
}
"""An engine's arguments that follow from other keys, with the key to set instead."""
OVERRIDES = "overrides"


def check_own_arguments(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield arguments of the engine in place of what other keys say."""
    infer = config.actor_infer
    own, given = OWN_ARGUMENTS.get(infer.strategy_args.strategy_name, {}), infer.engine.model_extra or {}
    for name, key in own.items():
        if name not in given or (name == "dtype" and given[name] == infer.model_args.dtype):
            continue
        yield ConfigIssue(
            f"{ENGINE}.{name}",
            f"{OVERRIDES} what follows from {key}: leave it out, or set that"
            if key
            else f"{OVERRIDES} what Offbeat sets itself: leave it out",
        )


def _find_load_problem(config: RunConfig) -> str:
    """Return why workers do not learn of the KV cache's load, or ""."""
    name = config.actor_infer.strategy_args.strategy_name
    if name != "vllm":
        return f"{name} does not tell the load of its KV cache: leave it out, or take vllm"
    return "" if config.uses_engine else "the pipeline samples nothing: leave it out"


def check_sampling(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield settings under which the ratio of equal weights is not 1, and sessions that the engine can't keep."""
    if config.actor_infer.keep_sessions and not config.actor_infer.can_keep_sessions:
        yield ConfigIssue(
            "actor_infer.keep_sessions",
            "needs on_weight_update: keep and prefix caching, an engine that never sleeps, and no router_replay: leave it "
            f"out, or set {ENGINE}.enable_sleep_mode=false",
        )
    if config.rollout.kv_usage_target is not None and (problem := _find_load_problem(config)):
        yield ConfigIssue("rollout.kv_usage_target", problem)
    args = config.actor_infer.generating_args
    if args.temperature < MIN_TEMPERATURE:
        reason = (
            f"{args.temperature} is sampled at {MIN_TEMPERATURE} by vLLM, but the trainer divides its logits by it: "
            f"take {MIN_TEMPERATURE} or more"
            if args.temperature
            else "0 (greedy) has no probabilities to train on: take a positive one; evaluations are greedy in any case"
        )
        yield ConfigIssue(sampling_key(config, "temperature"), reason)
    cuts = {"top_p": args.top_p < 1, "top_k": args.top_k > 0}
    for key in (name for name, is_set in cuts.items() if is_set and not _ignores_cuts(config)):
        yield ConfigIssue(
            sampling_key(config, key),
            f"{getattr(args, key)} records logprobs of the cut distribution, the trainer's are of the whole one, so ratios "
            "start at the kept probability mass: leave it out, or set old_logprobs=recompute, whose ratio is between the "
            "trainer's own logprobs (add train_infer_correction.is_weight to weight by the kept mass)",
        )
    for key in PROCESSORS:
        if key in (config.actor_infer.engine.model_extra or {}):
            yield ConfigIssue(
                f"{ENGINE}.{key}",
                "changes which distribution is sampled or recorded, and the trainer does not know it: leave it out",
            )


def sampling_key(config: RunConfig, name: str) -> str:
    """Return the key that sets a parameter of training's sampling."""
    is_managers = getattr(config.train_env_manager.generating_args, name) is not None
    return f"{'train_env_manager' if is_managers else 'actor_infer'}.generating_args.{name}"


def _ignores_cuts(config: RunConfig) -> bool:
    if config.old_logprobs == "recompute":
        return True
    return config.pg_variant in WITHOUT_RATIO and not config.train_infer_correction.filters
