"""What `hf_infer` can't do is found before the start, by the key that asks for it."""

import json
from pathlib import Path

import pytest

from offbeat.deploy.cluster.apps import generation
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.devices import choose_devices
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.run_setup import load_architecture
from offbeat.services.generation.config import HF_ARGUMENTS, VllmConfig
from offbeat.trainer.config.aliases import ENGINE
from tests.families import write_multimodal
from tests.paths import QUICKSTART

STRATEGY = "actor_infer.strategy_args.strategy_name"


def problems(*overrides: str) -> dict[str, str]:
    config = validate_tree(compose_tree(QUICKSTART, [f"{STRATEGY}=hf_infer", *overrides]))
    return {issue.path: issue.message for issue in check_run(config, cores=2)}


def test_the_quickstart_runs_with_it() -> None:
    assert problems() == {}
    assert problems("actor_infer.on_weight_update=recompute", f"+{ENGINE}.enable_prefix_caching=false") == {}


@pytest.mark.parametrize(
    "override",
    [
        "tensor_parallel_size=2",
        "tp_size=2",
        "pipeline_parallel_size=2",
        "enforce_eager=false",
        "max_num_batched_tokens=512",
        "quantization=fp8",
    ],
)
def test_arguments_of_vllm_alone_are_refused(override: str) -> None:
    name = override.partition("=")[0].replace("tp_size", "tensor_parallel_size")
    found = problems(f"+{ENGINE}.{override}", "actor_infer.cpus_per_replica=0.5")
    assert found[f"{ENGINE}.{name}"].endswith(f"leave {name} out, or take vllm")


def test_every_argument_that_it_has_is_a_field() -> None:
    assert set(HF_ARGUMENTS) <= VllmConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("override", "path", "says"),
    [
        ("actor_infer.device=cuda", "actor_infer.device", "take cpu, or vllm"),
        ("+tiny.vision={}", STRATEGY, "reads none: take vllm"),
        ("actor_infer.kv_cache_gib=0.0005", "actor_infer.kv_cache_gib", "hold no sequence of 512 tokens"),
        ("weights.transport=nccl", "weights.transport", "take shm"),
    ],
)
def test_what_it_does_not_support_is_refused(override: str, path: str, says: str) -> None:
    assert says in problems(override)[path]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of linear_attention"),
        ({"attn_logit_softcapping": 50.0}, "caps logits"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, ""),
    ],
)
def test_models_are_refused_by_their_layers(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """Heads of fewer dimensions than vLLM needs on a CPU are served."""
    architecture = load_architecture(validate_tree(compose_tree(QUICKSTART)))
    tmp_path.joinpath("config.json").write_text(json.dumps({**architecture, **change}))
    tmp_path.joinpath("tokenizer.json").write_text("{}")
    found = {path: message for path, message in problems(f"pretrain={tmp_path}").items() if path == STRATEGY}
    assert says in found.get(STRATEGY, "") if says else not found
    assert "head dimension" not in str(problems(f"pretrain={tmp_path}"))


def test_it_stays_on_the_cpu_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.deploy.config.devices.is_installed", lambda _: True)
    for name, device in (("vllm", "cuda"), ("hf_infer", "cpu")):
        config = validate_tree(compose_tree(QUICKSTART, [f"{STRATEGY}={name}"]))
        assert choose_devices(config, 4).actor_infer.device == device
        assert choose_devices(config, 4).actor_train.device == "cuda"


def test_an_application_that_it_cannot_serve_is_refused(tmp_path: Path) -> None:
    strategy = {"strategy_name": "hf_infer", "strategy_config": {"tensor_parallel_size": 2}}
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        generation(
            {
                "redis_url": "redis://127.0.0.1:1",
                "folder": str(tmp_path),
                "run": str(QUICKSTART),
                "config": {"actor_infer": {"strategy_args": strategy}},
            }
        )


def test_a_multimodal_folder_is_refused(tmp_path: Path) -> None:
    """Also one that is trained on text alone."""
    write_multimodal(tmp_path, "gemma3")
    assert problems(f"pretrain={tmp_path}")[STRATEGY].endswith("computes text models alone: take vllm")
