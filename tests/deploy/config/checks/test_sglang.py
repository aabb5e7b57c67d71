"""What `sglang` can't do is found before the start, by the key that asks for it."""

import sys
from pathlib import Path

import pytest

from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.devices import choose_devices
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.trainer.config.aliases import ENGINE
from tests.families import write_family
from tests.paths import QUICKSTART

STRATEGY = "actor_infer.strategy_args.strategy_name"
PYTHON = "actor_infer.strategy_args.python"


def problems(*overrides: str) -> dict[str, str]:
    tree = compose_tree(QUICKSTART, [f"{STRATEGY}=sglang", "actor_infer.device=cuda", *overrides])
    return {issue.path: issue.message for issue in check_run(validate_tree(tree), cores=2)}


@pytest.mark.parametrize(
    ("override", "path", "says"),
    [
        (f"+{PYTHON}=/none/python", PYTHON, "there is no program '/none/python'"),
        (f"+{PYTHON}={sys.executable}", PYTHON, "has no module 'sglang'"),
        ("weights.transport=nccl", "weights.transport", "nccl is of vLLM's engines"),
        (f"+{ENGINE}.pipeline_parallel_size=2", f"{ENGINE}.pipeline_parallel_size", "does not pause a pipeline"),
        (f"+{ENGINE}.max_lora_rank=8", f"{ENGINE}.max_lora_rank", "is given merged weights"),
        ("actor_infer.keep_sessions=true", "actor_infer.keep_sessions", "sessions stay in vLLM alone"),
        ("actor_infer.generating_args.top_p=0.9", "actor_infer.generating_args.top_p", "only where top_k is set"),
        ("+tiny.vision={}", STRATEGY, "is given text: take vllm"),
    ],
)
def test_what_it_does_not_support_is_refused(override: str, path: str, says: str) -> None:
    adapters = ["+actor_train.model_args.lora_target=all-linear"] if "lora" in override else []
    assert says in problems(override, *adapters)[path]


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    """It would sample from random experts: the server skips the learner's names, and reports nothing."""
    write_family(tmp_path, "qwen3_moe")
    assert "the model has 4 experts" in problems(f"pretrain={tmp_path}")[STRATEGY]


def test_a_cut_by_top_k_is_supported() -> None:
    found = problems("actor_infer.generating_args.top_p=0.9", "actor_infer.generating_args.top_k=50", "~pg_clip")
    assert not [path for path in found if "generating_args" in path], found


@pytest.mark.parametrize(
    ("top_k", "key", "says"),
    [
        (4096, "", "a top_k below 4096"),
        (100, "sampling_mask_max_tokens=100", "a top_k below 100"),
        (50, "speculative_algorithm=EAGLE", "not with speculative_algorithm or sampling_backend: ascend"),
        (50, "sampling_backend=ascend", "not with speculative_algorithm or sampling_backend: ascend"),
        (5000, "sampling_mask_max_tokens=8192", ""),
    ],
)
def test_a_cut_whose_logprobs_the_server_does_not_record_is_refused(top_k: int, key: str, says: str) -> None:
    keys = [f"+{ENGINE}.{key}"] if key else []
    found = problems(f"actor_infer.generating_args.top_k={top_k}", "old_logprobs=recompute", "~pg_clip", *keys)
    assert says in found.get("actor_infer.generating_args.top_k", "")


def test_other_keys_are_the_servers() -> None:
    """Its arguments are not those of vLLM."""
    found = problems(f"+{ENGINE}.schedule_policy=fcfs")
    assert not [path for path in found if "schedule_policy" in path or path == STRATEGY], found


def test_it_takes_gpus_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, python, device in (
        ("sglang", "", "cuda"),
        ("vllm", "", "cpu"),
        ("vllm", "/venv/bin/python", "cuda"),
    ):
        config = validate_tree(compose_tree(QUICKSTART, [f"{STRATEGY}=sglang", f"+{PYTHON}='{python}'"]))
        monkeypatch.setattr("offbeat.deploy.config.devices.is_installed", lambda name, one=installed: name == one)
        assert choose_devices(config, 4).actor_infer.device == device


def test_on_a_cpu_the_cache_must_hold_a_sequence() -> None:
    found = problems("actor_infer.device=cpu", "actor_infer.kv_cache_gib=0.00001")
    assert "hold no sequence of" in found["actor_infer.kv_cache_gib"]


def test_another_python_is_for_sglang_alone() -> None:
    assert "for sglang alone" in problems(f"{STRATEGY}=vllm", f"+{PYTHON}={sys.executable}")[PYTHON]
