"""Combinations that `router_replay` can't serve are found before the start, by the key that asks for them."""

from pathlib import Path

import pytest

from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.trainer.config.aliases import ENGINE
from tests.families import write_family
from tests.paths import CONFIGS, QUICKSTART

REPLAY = "router_replay"
STRATEGY = "actor_train.strategy_args"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_family(folder, "qwen3_moe")
    return folder


def problems(folder: Path | str, *overrides: str, file: Path = QUICKSTART) -> dict[str, str]:
    tree = compose_tree(file, [f"pretrain={folder}", f"+{REPLAY}=true", *overrides])
    return {issue.path: issue.message for issue in check_run(validate_tree(tree), cores=2, trial=False)}


def test_replay_has_the_engine_return_experts_and_keeps_no_sessions(mixture: Path) -> None:
    config = validate_tree(compose_tree(QUICKSTART, [f"pretrain={mixture}", f"+{REPLAY}=true"]))
    assert config.actor_infer.returns_routing
    assert not config.actor_infer.keeps_sessions
    assert not validate_tree(compose_tree(QUICKSTART, [f"pretrain={mixture}"])).actor_infer.returns_routing


def test_a_supported_mixture_is_accepted(mixture: Path) -> None:
    found = problems(mixture)
    assert not [path for path, message in found.items() if REPLAY in path + message]


@pytest.mark.parametrize(
    ("override", "path", "says"),
    [
        ("+actor_infer.strategy_args.strategy_name=hf_infer", REPLAY, "hf_infer does not return the experts"),
        ("+actor_infer.strategy_args.strategy_name=sglang", REPLAY, "sglang does not return the experts"),
        (f"+{ENGINE}.enable_return_routed_experts=false", f"{ENGINE}.enable_return_routed_experts", "leave"),
        (f"+{ENGINE}.enable_prefix_caching=false", f"{ENGINE}.enable_prefix_caching", "with prefix caching alone"),
        (f"+{ENGINE}.pipeline_parallel_size=2", f"{ENGINE}.pipeline_parallel_size", "take tensor_parallel_size"),
        ("+actor_infer.keep_sessions=true", "actor_infer.keep_sessions", "and no router_replay"),
        (f"+{ENGINE}.enforce_eager=false", f"{ENGINE}.enforce_eager", "a compiled model on a CPU"),
        (f"+{STRATEGY}.tp_size=2", f"{STRATEGY}.tp_size", "not with tp_size 2"),
        (f"+{STRATEGY}.pp_size=2", f"{STRATEGY}.pp_size", "not with pp_size 2"),
        (f"+{STRATEGY}.ulysses_size=2", f"{STRATEGY}.ulysses_size", "not with ulysses_size 2"),
        (f"+{STRATEGY}.strategy_name=megatron_train", REPLAY, "megatron_train's routers choose by themselves"),
    ],
)
def test_what_it_does_not_support_is_refused(override: str, path: str, says: str, mixture: Path) -> None:
    is_split = override.startswith(f"+{STRATEGY}") and override.endswith("_size=2")
    split = [f"+{STRATEGY}.strategy_name=fsdp2_train", "+actor_train.num_processes=2"] if is_split else []
    assert says in problems(mixture, override, *split)[path]


def test_engines_of_several_runs_are_refused(mixture: Path) -> None:
    found = problems(mixture, f"+{ENGINE}.max_loras=2", f"+{ENGINE}.max_lora_rank=8")
    assert "returns no experts, which router_replay needs" in found[f"{ENGINE}.max_loras"]


def test_dense_models_and_untested_families_are_refused(tmp_path: Path) -> None:
    assert "has no experts" in problems("tiny")[REPLAY]
    write_family(tmp_path, "deepseek_v2")
    assert "routers of deepseek_v2 can't be told" in problems(tmp_path)[REPLAY]


def test_rows_have_no_experts(mixture: Path) -> None:
    assert "pipeline sft trains on rows" in problems(mixture, file=CONFIGS / "sft.yaml")[REPLAY]


def test_experts_that_nothing_reads_are_refused(mixture: Path) -> None:
    found = problems(mixture, f"{REPLAY}=false", f"+{ENGINE}.enable_return_routed_experts=true")
    assert "nothing reads the experts" in found[f"{ENGINE}.enable_return_routed_experts"]
