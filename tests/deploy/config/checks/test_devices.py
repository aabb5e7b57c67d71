"""Devices are checked before a run starts."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.checks import devices
from offbeat.deploy.config.checks.devices import check_devices
from offbeat.deploy.config.checks.memory import critic_gib, learner_gib
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import choose_turns
from offbeat.services.generation.config import UTILIZATION
from tests.deploy.config.test_device_plan import ONE_GPU, TWO_NODES, config

KEY = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"


def issues(config: RunConfig, nodes: list[ClusterNode]) -> dict[str, str]:
    return {issue.path: issue.message for issue in check_devices(config, nodes)}


def with_memory(nodes: list[ClusterNode], memory_gib: float) -> list[ClusterNode]:
    return [node._replace(memory_gib=memory_gib) for node in nodes]


def write_model(folder: Path, num_weights: int) -> str:
    """Write the header of a model's file."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [num_weights // 2, 2], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return str(folder)


def sharing(utilization: float | None, **keys: Any) -> RunConfig:
    return config(infer={"strategy_args": {"strategy_config": {"gpu_memory_utilization": utilization}}}, **keys)


def test_defaults_on_one_gpu_are_accepted() -> None:
    assert issues(config(), ONE_GPU) == {}


def test_an_engine_must_leave_memory_to_the_learner_beside_it() -> None:
    assert "leaves 5% of a GPU" in issues(sharing(0.95), ONE_GPU)[KEY]
    assert issues(sharing(0.95), TWO_NODES) == {}


def test_a_model_too_large_for_engine_and_learner_is_refused(tmp_path: Path) -> None:
    one_gpu = with_memory(ONE_GPU, 80.0)
    small, large = (tmp_path / name for name in ("small", "large"))
    small.mkdir()
    large.mkdir()
    assert issues(config(pretrain=write_model(small, 2**30)), one_gpu) == {}
    says = issues(config(pretrain=write_model(large, 3 * 2**30)), one_gpu)[KEY]
    assert "36.0 GiB (0.45) and at least 48.0 GiB" in says
    assert "take at most 0.40" in says
    assert issues(sharing(0.4, pretrain=str(large)), one_gpu) == {}


def test_published_versions_in_the_learners_gpu_are_counted(tmp_path: Path) -> None:
    """Of 2 GiB each: two that are kept, and, beside an engine, both copies of a load; alone, one on its way."""
    pretrain = write_model(tmp_path, 2**30)
    for nodes, least_gib, key, transport, num_versions in (
        (ONE_GPU, 16.0 / 0.55, KEY, "ipc", 4),
        (TWO_NODES, 16.0, "actor_train.strategy_args.zero_stage", "nccl", 3),
    ):
        sent = {"transport": transport, "dtype": "bfloat16"}
        run = config(pretrain=pretrain), config(pretrain=pretrain, weights=sent)
        assert [list(issues(each, with_memory(nodes, least_gib + 1))) for each in run] == [[], [key]]
        assert issues(run[1], with_memory(nodes, least_gib + 15)) == {}
        held = issues(run[1], with_memory(nodes, least_gib + 1))[key]
        needed = f"at least {16 + 2 * num_versions:.1f} GiB of the learner's weights, gradients, moments"
        assert f"{needed} and {num_versions} published version(s)" in held
        assert "or weights.transport shm" in held


OFFLOADED = {"strategy_config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}


@pytest.mark.parametrize(
    ("train", "gib"),
    [
        ({}, 16.0),
        ({"model_args": {"dtype": "bfloat16"}}, 16.0),
        ({"num_processes": 4, "strategy_args": {"zero_stage": 1}}, 10.0),
        ({"num_processes": 4, "model_args": {"dtype": "bfloat16"}}, 7.0),
        ({"num_processes": 4, "strategy_args": {"zero_stage": 3}}, 4.0),
        ({"num_processes": 4, "strategy_args": {"strategy_name": "fsdp2_train"}}, 4.0),
        ({"model_args": {"lora_target": "q_proj"}}, 4.0),
        ({"num_processes": 4, "model_args": {"lora_target": "q_proj"}, "strategy_args": {"zero_stage": 3}}, 1.0),
        ({"strategy_args": {"zero_stage": 1} | OFFLOADED}, 8.0),
        ({"strategy_args": OFFLOADED}, 16.0),
        ({"training_args": {"optim": "adamw_8bit"}}, 10.0),
        ({"training_args": {"optim": "adamw_8bit"}, "model_args": {"dtype": "bfloat16"}}, 10.0),
    ],
)
def test_a_learners_memory_counts_what_its_strategy_shards(train: dict[str, Any], gib: float, tmp_path: Path) -> None:
    assert learner_gib(config(train, pretrain=write_model(tmp_path, 2**30))) == gib


def test_a_warm_start_of_adapters_trains_all_weights(tmp_path: Path) -> None:
    """It ends before the first version is published."""
    adapters = {"model_args": {"lora_target": "q_proj"}}
    warm = {"tag": "FrozenLake", "demos": "offbeat.envs.frozen_lake.demos:careful_wandering"}
    cold, run = (config(adapters, pretrain=write_model(tmp_path, 2**30), warm_start=each) for each in (None, warm))
    assert (learner_gib(cold, 3), learner_gib(run, 3)) == (4.0 + 3 * 4.0, 16.0)
    assert (learner_gib(cold, 4), learner_gib(run, 4)) == (20.0, 20.0)
    says = issues(run, with_memory(TWO_NODES, 12.0))["actor_train.strategy_args.zero_stage"]
    assert "whose warm start trains all weights" in says
    assert issues(cold, with_memory(TWO_NODES, 12.0)) == {}


PPO = {"adv_estimator": "gae", "reward_normalization": {"method": "identity"}}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
OWN = {"strategy_args": {"placement": "service"}}


@pytest.mark.parametrize(
    ("train", "keys", "gib", "critic"),
    [
        ({}, PPO, 32.0, 0.0),  # policy and critic
        ({}, PPO | {"critic": {"num_processes": 1}}, 16.0, 16.0),
        ({"strategy_args": {"zero_stage": 2}}, PPO | {"critic": {"num_processes": 2}}, 16.0, 10.0),
        ({"model_args": {"lora_target": "q_proj"}}, PPO | {"critic": {"num_processes": 2}}, 4.0, 16.0),
        ({}, PPO | {"critic": {"backbone": "policy"}}, 16.0, 0.0),
        ({}, KL, 20.0, 0.0),
        ({}, KL | {"reference": OWN}, 16.0, 0.0),
        ({"model_args": {"lora_target": "q_proj"}}, KL, 4.0, 0.0),  # the policy without adapters
    ],
)
def test_the_memory_of_each_role_is_where_it_is_computed(
    train: dict[str, Any], keys: dict[str, Any], gib: float, critic: float, tmp_path: Path
) -> None:
    run = config(train, pretrain=write_model(tmp_path, 2**30), **keys)
    assert (learner_gib(run), critic_gib(run, run.num_critic_processes)) == (gib, critic)


@pytest.mark.parametrize(
    ("memory_gib", "keys", "key", "says"),
    [
        (12.0, {}, "actor_train.strategy_args.zero_stage", "at least 16.0 GiB"),
        (12.0, PPO | {"critic": {"num_processes": 1}}, "critic.num_processes", "at least 16.0 GiB of the critic's"),
        (3.0, KL | {"reference": OWN}, "reference.strategy_args.placement", "the whole model, 4.0 GiB"),
        (4.0, {}, KEY.replace("gpu_memory_utilization", "tensor_parallel_size"), "take 4.0 GiB of each of its 1"),
    ],
)
def test_a_role_that_no_gpu_holds_is_refused_with_the_numbers(
    memory_gib: float, keys: dict[str, Any], key: str, says: str, tmp_path: Path
) -> None:
    run = config(pretrain=write_model(tmp_path, 2**30), **keys)
    assert says in issues(run, with_memory(TWO_NODES, memory_gib))[key]


def test_each_role_is_weighed_by_the_node_that_it_is_on(tmp_path: Path) -> None:
    """Devices 0 to 3 are of the node with 12 GiB, 4 to 7 of that with 80; policy and learner need 16, and share both."""
    nodes = [ClusterNode("a", "10.0.0.1", 4, 12.0), ClusterNode("b", "10.0.0.2", 4, 80.0)]
    pretrain = write_model(tmp_path, 2**30)

    def found(learner: list[int], engines: list[int]) -> dict[str, str]:
        return issues(config({"device_mapping": learner}, {"device_mapping": engines}, pretrain=pretrain), nodes)

    assert found([4], [0]) == {}
    (message,) = found([0], [4]).values()
    assert "at least 16.0 GiB" in message
    assert "exceed the GPU's 12.0 GiB on 10.0.0.1" in message
    assert found([5], [5]) == {}
    assert "exceed the GPU's 12.0 GiB on 10.0.0.1" in found([3], [3])[KEY]
    assert issues(config(pretrain=pretrain), nodes) == {}  # Ray chooses
    unknown = [nodes[0]._replace(memory_gib=None), nodes[1]]
    assert issues(config({"device_mapping": [0]}, {"device_mapping": [4]}, pretrain=pretrain), unknown) == {}
    small = [nodes[0], nodes[1]._replace(memory_gib=None)]
    assert issues(config(pretrain=pretrain), small) == {}  # Ray may choose the one that is unknown
    assert issues(config(pretrain=pretrain), with_memory(nodes, 12.0)) != {}


TENSOR_PARALLEL = KEY.replace("gpu_memory_utilization", "tensor_parallel_size")


@pytest.mark.parametrize(
    ("infer", "gib"),
    [
        ({}, 4.0),  # float32, as the learner
        ({"model_args": {"dtype": "bfloat16"}}, 2.0),
        ({"strategy_args": {"strategy_config": {"tensor_parallel_size": 2}}}, 2.0),
        ({"strategy_args": {"strategy_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}}, 1.0),
        ({"strategy_args": {"strategy_config": {"quantization": "fp8"}}}, 0.0),
    ],
)
def test_an_engine_must_hold_its_part_of_the_weights(infer: dict[str, Any], gib: float, tmp_path: Path) -> None:
    """In its share, 0.85, of each device; the learner is on a CPU."""
    run = config({"device": "cpu"}, infer, pretrain=write_model(tmp_path, 2**30))
    for memory_gib, is_refused in ((gib / 0.85 - 0.01, gib > 0), (gib / 0.85 + 0.01, False)):
        found = issues(run, with_memory(TWO_NODES, memory_gib))
        assert (TENSOR_PARALLEL in found) == is_refused
        assert not is_refused or f"the engine's weights take {gib:.1f} GiB" in found[TENSOR_PARALLEL]


def test_an_engine_of_the_deploy_file_is_not_weighed(tmp_path: Path) -> None:
    nodes, pretrain = with_memory(TWO_NODES, 1.0), write_model(tmp_path, 2**30)
    assert TENSOR_PARALLEL not in issues(config({"device": "cpu"}, {"app": "shared"}, pretrain=pretrain), nodes)
    assert TENSOR_PARALLEL in issues(config({"device": "cpu"}, pretrain=pretrain), nodes)


@pytest.mark.parametrize(
    ("reward", "gib"),
    [
        ({"kind": "reward_model"}, 4.0),
        ({"kind": "reward_model", "model_args": {"dtype": "bfloat16"}}, 2.0),
        ({"kind": "llm_judge"}, 2.0),
        ({"kind": "llm_judge", "strategy_args": {"strategy_config": {"tensor_parallel_size": 2}}}, 1.0),
        ({"kind": "llm_judge", "strategy_args": {"strategy_config": {"quantization": "fp8"}}}, 0.0),
    ],
)
def test_a_reward_must_fit_its_devices(reward: dict[str, Any], gib: float, tmp_path: Path) -> None:
    share = UTILIZATION if reward["kind"] == "llm_judge" else 1.0
    args = {"model_name_or_path": write_model(tmp_path, 2**30), **reward.get("model_args", {})}
    on_cpus = ({"device": "cpu"}, {"device": "cpu"})
    key = "rewards.0.model_args.model_name_or_path"
    for device, memory_gib, is_refused in (
        ("cuda", gib / share - 0.1, gib > 0), ("cuda", gib / share + 0.1, False), ("cpu", 0.1, False)
    ):  # fmt: skip
        given = {"name": "r", **reward, "model_args": args, "device": device}
        found = issues(config(*on_cpus, pipeline="rlvr", rewards=[given]), with_memory(TWO_NODES, memory_gib))
        assert (key in found) == is_refused
        assert not is_refused or f"its weights take {gib:.1f} GiB" in found[key]


def test_a_tiny_policy_is_not_weighed() -> None:
    assert learner_gib(config()) is None


def test_a_mapping_without_effect_is_refused() -> None:
    cpu = config({"device": "cpu", "device_mapping": [0]}, {"device": "cpu"})
    assert "on a CPU" in issues(cpu, TWO_NODES)["actor_train.device_mapping"]
    apart = config({"device_mapping": [0, 1]}, {"device_mapping": [2]}, reference={"device_mapping": [3]})
    assert "take the devices of actor_train" in issues(apart, TWO_NODES)["reference.device_mapping"]
    together = config({"device_mapping": [0, 1]}, {"device_mapping": [2]}, reference={"device_mapping": [0, 1]})
    assert issues(together, TWO_NODES) == {}


def test_this_machine_has_the_gpus_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.local_node().gpus == 0
    assert {issue.path for issue in check_devices(config(), None)} == {"actor_train.device", "actor_infer.device"}


def test_this_machines_memory_counts_for_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose nodes did not answer is not weighed by the GPUs of the machine that checks."""
    monkeypatch.setattr(devices, "read_memory_gib", lambda: 12.0)
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    run = config({"device": "cuda"}, {"device": "cpu"}, pretrain=write_model(tmp_path, 2**30))
    assert [issue.path for issue in check_devices(run, None)] == ["actor_train.strategy_args.zero_stage"]
    assert issues(run, TWO_NODES) == {}


@pytest.mark.parametrize(
    ("train", "advice"),
    [
        ({}, "zero_stage, lora_target or training_args.optim adamw_8bit"),
        ({"training_args": {"optim": "adamw_8bit"}}, "zero_stage or lora_target"),
        ({"model_args": {"lora_target": "q_proj"}}, "zero_stage or lora_target"),
        ({"strategy_args": {"strategy_name": "fsdp2_train"}}, "zero_stage or lora_target"),
    ],
)
def test_a_learner_too_large_is_told_what_takes_less(train: dict[str, Any], advice: str, tmp_path: Path) -> None:
    run = config(train, pretrain=write_model(tmp_path, 2**30))
    message = issues(run, with_memory(TWO_NODES, 2.0))["actor_train.strategy_args.zero_stage"]
    assert message.endswith(f"take more devices, {advice}")


def turns(**keys: Any) -> RunConfig:
    return choose_turns(config(max_staleness=0, **keys), ONE_GPU)


def test_a_learner_in_turns_must_fit_alone(tmp_path: Path) -> None:
    one_gpu, pretrain = with_memory(ONE_GPU, 16.0), write_model(tmp_path, 750_000_000)
    train = {"model_args": {"dtype": "float32"}}
    assert "exceed the GPU's 16.0 GiB" in issues(config(train, pretrain=pretrain), one_gpu)[KEY]
    assert issues(turns(train=train, pretrain=pretrain), one_gpu) == {}
    held = issues(turns(train=train, pretrain=pretrain, weights={"transport": "ipc"}), one_gpu)[KEY]
    assert "11.2 GiB of 4 published version(s), copies of a load included" in held
    pretrain = write_model(tmp_path, 1_500_000_000)
    alone = issues(turns(train=train, pretrain=pretrain), one_gpu)["actor_train.strategy_args.zero_stage"]
    assert "also while the engine sleeps" in alone


def test_a_learner_that_can_not_leave_the_gpu_takes_no_turns() -> None:
    half = {"model_args": {"dtype": "bfloat16"}, "strategy_args": {"zero_stage": 1}}
    assert not turns(train=half).takes_turns
    sleeping = {"strategy_args": {"strategy_config": {"enable_sleep_mode": True}}}
    problems = issues(config(half, sleeping, max_staleness=0), ONE_GPU)
    assert "zero_stage 2 or 3" in problems["actor_infer.strategy_args.strategy_config.enable_sleep_mode"]
    whole = {"model_args": {"dtype": "float32"}, "strategy_args": {"zero_stage": 1}}
    critic = {"model_args": {"dtype": "bfloat16"}}
    assert turns(train=whole, **PPO).takes_turns
    assert not turns(train=whole, **PPO, critic=critic).takes_turns
    problems = issues(config(whole, sleeping, max_staleness=0, **PPO, critic=critic), ONE_GPU)
    assert "critic.model_args.dtype" in problems["actor_infer.strategy_args.strategy_config.enable_sleep_mode"]
    offloading = {"strategy_args": {"zero_stage": 1} | OFFLOADED}
    assert not turns(train=offloading).takes_turns
    reference = {"strategy_args": {"strategy_name": "deepspeed_infer"}}
    assert not turns(reference=reference).takes_turns
