import pytest

from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.services.generation.config import GenerationConfig
from offbeat.trainer.config.aliases import ENGINE
from tests.deploy.config.checks.test_run import problems
from tests.paths import QUICKSTART

ARGS = "actor_infer.generating_args"
CUT = f"{ARGS}.top_p=0.9"


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ([CUT, "+old_logprobs=behavior"], f"{ARGS}.top_p", "old_logprobs=recompute"),
        ([f"{ARGS}.top_k=20", "+old_logprobs=behavior"], f"{ARGS}.top_k", "kept probability mass"),
        ([CUT, "pg_variant=aipo", "~pg_clip"], f"{ARGS}.top_p", "kept probability mass"),
        (
            [CUT, "pg_variant=vanilla", "~pg_clip", "+train_infer_correction.filters=[{ratio_high: 5.0}]"],
            f"{ARGS}.top_p",
            "kept probability mass",
        ),
        (["+actor_infer.engine_kwargs.logprobs_mode=raw_logprobs"], f"{ENGINE}.logprobs_mode", "leave"),
    ],
)
def test_a_cut_distribution_is_not_trained_on_as_the_whole_one(overrides: list[str], path: str, says: str):
    assert says in problems(*overrides).get(path, "")


@pytest.mark.parametrize(("name", "value"), [("temperature", "0"), ("temperature", "0.009"), ("top_p", "0.9")])
def test_the_key_that_is_set_is_named(name: str, value: str):
    key = f"train_env_manager.generating_args.{name}"
    others = [] if name == "top_p" else [f"~{ARGS}.{name}"]  # which the quickstart sets
    assert problems(*others, f"+{key}={value}", "+old_logprobs=behavior").keys() == {key}


@pytest.mark.parametrize(
    "overrides",
    [
        [CUT, "+old_logprobs=recompute", "+train_infer_correction.is_weight={}", "~pg_clip"],
        [CUT, "pg_variant=vanilla", "~pg_clip"],
        [CUT, "~pg_clip"],
        [f"{ARGS}.top_k=20", "~pg_clip"],
        [f"{ARGS}.top_k=-1"],
        [f"{ARGS}.top_k=0"],
    ],
)
def test_losses_that_do_not_compare_with_the_cut_distribution_are_accepted(overrides: list[str]):
    assert problems(*overrides) == {}


@pytest.mark.parametrize(
    ("engine", "name", "value", "says"),
    [
        ("vllm", "dtype", "float16", "actor_infer.model_args.dtype: leave it out, or set that"),
        ("vllm", "dtype", "float32", ""),
        ("vllm", "seed", "3", "follows from seed"),
        ("vllm", "skip_tokenizer_init", "false", "what Offbeat sets itself"),
        ("vllm", "scheduler_cls", "vllm.v1.core.sched.scheduler.Scheduler", "what Offbeat sets itself"),
        ("vllm", "load_format", "auto", ""),
        ("vllm", "max_num_batched_tokens", "512", ""),
        ("sglang", "random_seed", "3", "follows from seed"),
        ("sglang", "max_running_requests", "3", f"{ENGINE}.max_num_seqs"),
        ("sglang", "schedule_policy", "fcfs", ""),
    ],
)
def test_engine_arguments_do_not_override_other_keys(engine: str, name: str, value: str, says: str):
    strategy = f"+actor_infer.strategy_args.strategy_name={engine}"
    found = problems(strategy, f"+{ENGINE}.{name}={value}").get(f"{ENGINE}.{name}", "")
    assert says in found
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    "cause",
    [
        "actor_infer.on_weight_update=recompute",
        f"+{ENGINE}.enable_prefix_caching=false",
        f"+{ENGINE}.enable_sleep_mode=true",
    ],
)
def test_sessions_are_refused_where_the_engine_keeps_none_and_left_out_by_default(cause: str):
    assert "keep_sessions" not in str(problems(cause))
    assert "leave it out" in problems(cause, "+actor_infer.keep_sessions=true")["actor_infer.keep_sessions"]
    assert problems(cause, "+actor_infer.keep_sessions=false").keys() == problems(cause).keys()
    config = engine_config(cause)
    assert config.can_keep_sessions is config.keeps_sessions is False


def test_a_target_of_the_kv_cache_needs_an_engine_that_tells_its_load():
    target = "+rollout.kv_usage_target=0.7"
    assert "rollout.kv_usage_target" not in problems(target)
    for name in ("hf_infer", "sglang"):
        found = problems(target, f"+actor_infer.strategy_args.strategy_name={name}")
        assert (
            found["rollout.kv_usage_target"]
            == f"{name} does not tell the load of its KV cache: leave it out, or take vllm"
        )


def test_an_engine_on_a_cpu_keeps_sessions_by_default():
    assert engine_config().keeps_sessions
    assert not engine_config("+actor_infer.keep_sessions=false").keeps_sessions
    on_gpu = engine_config("+actor_infer.device=cuda")
    assert on_gpu.can_keep_sessions
    assert not on_gpu.keeps_sessions
    assert engine_config("+actor_infer.device=cuda", "+actor_infer.keep_sessions=true").keeps_sessions


def engine_config(*overrides: str) -> GenerationConfig:
    return validate_tree(compose_tree(QUICKSTART, overrides)).actor_infer
