from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config import devices, loader
from offbeat.deploy.config.checks import devices as checks
from offbeat.deploy.config.devices import choose_devices, count_gpus
from offbeat.deploy.config.loader import canonical_tree, validate_tree
from tests.paths import QUICKSTART

SCORED = {
    "add_token_level_kl": True,
    "init_kl_coef": 0.1,
    "reference": {"strategy_args": {"placement": "service"}},
}
"""Keys of a run with a scoring service."""
PPO = {"adv_estimator": "gae", "reward_normalization": {"method": "identity"}, "critic": {"num_processes": 1}}
"""Keys of a run with a critic of its own."""
ON_CUDA = {"actor_train": {"device": "cuda"}}


def rewarded(number: int = 1, size: int = 1, device: str = "cuda") -> dict[str, Any]:
    judge = {"name": "judge", "kind": "llm_judge", "model_args": {"model_name_or_path": "judge"}, "device": device}
    judge |= {"num_replicas": number, "strategy_args": {"strategy_config": {"tensor_parallel_size": size}}}
    return {"pipeline": "rlvr", "rewards": [{"name": "answer", "kind": "math_rule"}, judge]}


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "is_installed", lambda name: name == "vllm")


def chosen(gpus: float, **tables: Any) -> tuple[str, str]:
    config = choose_devices(validate_tree({"custom_envs": {}, **tables}), gpus)
    return config.actor_infer.device, config.actor_train.device


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.parametrize(
    ("gpus", "tables", "expected"),
    [
        (0, {}, ("cpu", "cpu")),
        (1, {}, ("cuda", "cuda")),
        (2, {}, ("cuda", "cuda")),
        (2, {"actor_infer": {"num_replicas": 2}}, ("cuda", "cuda")),
        (1, SCORED, ("cuda", "cpu")),
        (2, SCORED, ("cuda", "cuda")),
        (2, {"actor_infer": {"num_replicas": 3}}, ("cpu", "cuda")),
        (3, {"actor_train": {"num_processes": 3}}, ("cuda", "cuda")),
        (3, {"actor_train": {"num_processes": 4}}, ("cuda", "cpu")),
        (2, {"actor_infer": {"device": "cpu"}}, ("cpu", "cuda")),
        (2, {"actor_train": {"device": "cpu"}}, ("cuda", "cpu")),
        (1, {"actor_infer": {"device": "cpu"}}, ("cpu", "cuda")),
        (1, rewarded(), ("cpu", "cpu")),
        (1, rewarded(device="cpu"), ("cuda", "cuda")),
        (2, rewarded(), ("cuda", "cuda")),
        (2, rewarded(2), ("cpu", "cpu")),
        (3, rewarded(size=2), ("cuda", "cuda")),
        (3, rewarded(size=2) | {"actor_infer": {"num_replicas": 2}}, ("cpu", "cuda")),
        (1, SCORED | ON_CUDA, ("cpu", "cuda")),
        (2, SCORED | ON_CUDA, ("cuda", "cuda")),
        (1, PPO | ON_CUDA, ("cpu", "cuda")),
        (2, PPO | ON_CUDA, ("cuda", "cuda")),
    ],
)
def test_roles_without_a_device_take_free_gpus(gpus: float, tables: dict[str, Any], expected: tuple[str, str]):
    assert chosen(gpus, **tables) == expected


def test_gpus_are_left_alone_without_cudas_vllm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "is_installed", lambda _: False)
    assert chosen(8) == ("cpu", "cpu")


def test_settings_of_gpus_are_left_out_where_cpus_are_chosen():
    attention = {"model_args": {"attn_implementation": "fa2"}}
    tables = {"actor_infer": {"gpu_memory_utilization": 0.8}, "actor_train": attention, "reference": attention}
    config = choose_devices(validate_tree(canonical_tree({"custom_envs": {}, **tables})), 0)
    assert config.actor_infer.engine.gpu_memory_utilization is None
    assert {config.actor_train.model_args.attn_implementation, config.reference.model_args.attn_implementation} == {
        "auto"
    }


def test_flash_attention_stays_where_its_package_is(monkeypatch: pytest.MonkeyPatch):
    args = {"actor_train": {"model_args": {"attn_implementation": "flash_attention_2"}}}
    monkeypatch.setattr(devices, "is_installed", lambda _: True)
    config = choose_devices(validate_tree({"custom_envs": {}, **args}), 2)
    assert config.actor_train.model_args.attn_implementation == "flash_attention_2"


@pytest.mark.usefixtures("with_cuda")
def test_chosen_devices_stay_when_the_run_is_read_again():
    config = choose_devices(validate_tree({"custom_envs": {}, **SCORED}), 1)
    again = choose_devices(validate_tree(config.model_dump(mode="json")), 8)
    assert (again.actor_infer.device, again.actor_train.device) == ("cuda", "cpu")


@pytest.mark.usefixtures("with_cuda")
def test_a_run_of_this_machine_takes_its_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "count_gpus", lambda: 2)
    monkeypatch.setattr(checks, "count_gpus", lambda: 2)
    config = loader.load_run(QUICKSTART)
    assert (config.actor_infer.device, config.actor_train.device) == ("cuda", "cuda")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        *[("", 0), (" ", 0), ("-1", 0), ("NoDevFiles", 0), ("none", 0), ("0,-1,1", 1), ("1,0", 2), ("0,1,2,3", 2)],
        *[("7", 0), ("0,5,1", 1), ("0,0", 0)],
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2", 1),
    ],
)
def test_hidden_gpus_are_not_counted(visible: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == expected
