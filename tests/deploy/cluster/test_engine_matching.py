import re
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.cluster.engine_matching import choose_app, use_app
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import load_architecture
from offbeat.services.generation.config import EngineModelArgs, GenerationConfig, app_name
from offbeat.services.generation.tenancy import EngineOffer
from tests.families import write_vision_policy
from tests.paths import QUICKSTART


def run_config(*overrides: str) -> RunConfig:
    return validate_tree(compose_tree(QUICKSTART, overrides))


def offer(run: RunConfig, **changes: Any) -> EngineOffer:
    values: dict[str, Any] = {
        "architecture": load_architecture(run),
        "sequence_length": run.sequence_length,
        "config": run.actor_infer,
        "transport": run.weights.transport,
        "log_dir": "/logs",
    }
    return EngineOffer(**{**values, **changes})


def choose(config: RunConfig, offers: dict[str, EngineOffer], busy: tuple[str, ...] = ()) -> str | None:
    app, problems = choose_app(config, offers, lambda app: app not in busy)
    assert problems == []
    return app


def messages(config: RunConfig, offers: dict[str, EngineOffer]) -> str:
    _, problems = choose_app(config, offers, lambda _: True)
    assert {problem.path for problem in problems} == {"actor_infer.app"}
    return " ".join(problem.message for problem in problems)


def test_run_takes_a_free_application_equal_to_its_own():
    config = run_config()
    offers = {"a": offer(config), "b": offer(config)}
    assert choose(config, offers) == "a"
    assert choose(config, offers, busy=("a",)) == "b"
    assert choose(config, offers, busy=("a", "b")) is None
    assert choose(config, {}) is None


def test_run_specific_settings_do_not_prevent_a_match():
    config = run_config("actor_infer.generating_args.temperature=0.7", "actor_infer.request_timeout_s=9.0")
    assert choose(config, {"a": offer(run_config())}) == "a"


def test_sglang_run_of_an_earlier_build_takes_the_application_that_it_had():
    """Its record says `enforce_eager: true`, then the default."""
    sglang = "actor_infer.strategy_args.strategy_name=sglang"
    saved = run_config(sglang, "actor_infer.strategy_args.strategy_config.enforce_eager=true")
    assert choose(saved, {"a": offer(run_config(sglang))}) == "a"


def test_image_input_is_compared_where_a_policy_is_trained_on_text_without(tmp_path: Path):
    """A run on images takes no engine that has no vision tower, by name or without; others have it always."""
    key = "actor_infer.model_args.image_input"
    text, sees = run_config("tiny.vision={}"), run_config("tiny.vision={}", f"{key}=true")
    assert choose(sees, {"a": offer(text)}) == "a"
    write_vision_policy(tmp_path, "qwen3_vl", ["Left"])
    text, sees = (run_config(f"pretrain={tmp_path}", *keys) for keys in ((), (f"{key}=true",)))
    assert choose(sees, {"a": offer(text)}) is choose(text, {"a": offer(sees)}) is None
    assert choose(sees, {"a": offer(sees)}) == "a"
    named = run_config(f"pretrain={tmp_path}", f"{key}=true", "actor_infer.app=a")
    assert "image_input is False, the run's is True" in messages(named, {"a": offer(text)})


@pytest.mark.parametrize(
    "override",
    [
        "actor_infer.dtype=bfloat16",
        "actor_infer.num_replicas=2",
        "actor_infer.update_timeout_s=300.0",
        "tiny.hidden_size=128",
        "sequence_length=1024",
    ],
)
def test_run_with_another_engine_deploys_its_own(override: str):
    assert choose(run_config(override), {"a": offer(run_config())}) is None


def test_a_learner_takes_no_turns_with_engines_of_the_deploy_file():
    """They never sleep; it would leave and load its devices for nobody in each step."""
    config = run_config("actor_infer.strategy_args.strategy_config.enable_sleep_mode=true")
    app = choose(config, {"generation-local": offer(run_config())})
    assert app == "generation-local"
    for run in (use_app(config, app), use_app(use_app(config, app), None)):
        assert (run.actor_infer.app, run.takes_turns) == (app, False)
    own = config.model_copy(
        update={"actor_infer": config.actor_infer.model_copy(update={"app": "generation-quickstart"})}
    )
    for run, name in ((config, None), (own, "generation-quickstart")):
        assert (use_app(run, None).actor_infer.app, use_app(run, None).takes_turns) == (name, True)


def test_run_that_names_its_own_application_deploys_it():
    config = run_config(f"actor_infer.app={app_name('quickstart')}")
    assert choose(config, {"a": offer(run_config())}) is None


@pytest.mark.parametrize("app", [None, "generation-local", "generation-other"])
def test_a_run_named_like_a_deployed_application_is_rejected(app: str | None):
    """It would take that application for its own, unchecked, and delete it at its end."""
    config = run_config("exp_name=local", *([f"actor_infer.app={app}"] if app else []))
    _, (problem,) = choose_app(config, {"generation-local": offer(config), "generation-other": offer(config)}, bool)
    assert problem.path == "exp_name"
    assert "generation-local is an application of the deploy file" in problem.message


def test_named_application_with_the_same_model_is_taken():
    """Its engine settings may differ."""
    offers = {
        "a": offer(run_config(), config=GenerationConfig(model_args=EngineModelArgs(dtype="bfloat16"), num_replicas=3))
    }
    assert choose(run_config("actor_infer.app=a"), offers) == "a"


def test_unknown_application_is_rejected_with_the_known_ones():
    assert "there is a, b" in messages(
        run_config("actor_infer.app=c"), {"b": offer(run_config()), "a": offer(run_config())}
    )
    assert "there is none" in messages(run_config("actor_infer.app=c"), {})


def test_another_runs_own_application_is_rejected_by_the_claim():
    assert choose(run_config("actor_infer.app=generation-other"), {}, busy=("generation-other",)) == "generation-other"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("tiny.hidden_size=128", "hidden_size of config.json differ"),
        ("sequence_length=1024", "context of 512 tokens is below"),
        ("actor_infer.on_weight_update=recompute", "on_weight_update is keep"),
        ("router_replay=true", "its engines return no experts, which router_replay needs"),
        ("actor_infer.max_lora_rank=8", "max_lora_rank is None, the run's is 8"),
        ("actor_infer.max_lora_rank=8", "its engines take whole weights alone; leave max_lora_rank out"),
        ("weights.transport=nccl", "takes weights by shm, the run sends them by nccl"),
    ],
)
def test_unsuitable_application_is_rejected_with_the_reason(override: str, reason: str):
    assert reason in messages(run_config("actor_infer.app=a", override), {"a": offer(run_config())})


def test_an_application_with_experts_takes_no_run_that_does_not_read_them():
    with_experts = run_config("router_replay=true").actor_infer
    offers = {"a": offer(run_config(), config=with_experts)}
    assert "runs with router_replay alone read" in messages(run_config("actor_infer.app=a"), offers)
    assert choose(run_config("actor_infer.app=a", "router_replay=true"), offers) == "a"


def adapter_run(*overrides: str) -> RunConfig:
    return run_config("+actor_train.model_args.lora_target=all-linear", "actor_infer.max_lora_rank=8", *overrides)


def test_run_takes_an_application_with_room_for_more_or_larger_adapters():
    shared = offer(adapter_run("actor_infer.max_lora_rank=16", "actor_infer.max_loras=4"))
    assert choose(adapter_run(), {"a": shared}) == "a"
    assert choose(adapter_run("actor_infer.num_replicas=2"), {"a": shared}) is None
    assert choose(adapter_run(), {"a": offer(adapter_run("actor_infer.max_lora_rank=16"))}) is None, "as with one slot"
    assert choose(adapter_run(), {"a": shared}, busy=("a",)) is None


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (
            run_config("actor_infer.app=a"),
            "max_lora_rank is 16, the run's is None: its engines take adapters alone; set",
        ),
        (
            adapter_run("actor_infer.app=a", "actor_infer.max_lora_rank=32"),
            "is 32: take up to 16 for max_lora_rank and ",
        ),
    ],
)
def test_runs_without_adapters_or_with_larger_ones_are_rejected(run: RunConfig, reason: str):
    shared = offer(adapter_run("actor_infer.max_lora_rank=16", "actor_infer.max_loras=4"))
    assert re.search(reason, messages(run, {"a": shared}))
