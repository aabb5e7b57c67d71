"""Weights by CUDA IPC where engine and learner share a GPU."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.checks import devices as device_checks
from offbeat.deploy.config.checks.devices import check_devices
from offbeat.deploy.config.device_plan import ClusterNode, plan_devices
from offbeat.deploy.config.loader import load_run, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import choose_turns
from offbeat.deploy.config.transport import choose_transport
from offbeat.services import gpu_memory
from offbeat.services.devices import EngineDevices
from tests.deploy.config.checks.test_devices import write_model
from tests.deploy.config.test_device_plan import ONE_GPU, TWO_NODES, config, engine, scored
from tests.paths import QUICKSTART


def transport(run: RunConfig, nodes: list[ClusterNode] = ONE_GPU) -> str:
    return choose_transport(choose_turns(run, nodes), nodes).weights.transport


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_engine_on_the_learners_gpu_maps_its_weights(max_staleness: int) -> None:
    assert transport(config(max_staleness=max_staleness)) == "ipc"
    mapped = config({"device_mapping": [5]}, {"device_mapping": [5]}, max_staleness=max_staleness)
    assert transport(mapped, TWO_NODES) == "ipc"


@pytest.mark.parametrize(
    ("nodes", "keys"),
    [
        (TWO_NODES, {}),
        ([ONE_GPU[0]._replace(shares_memory=False)], {}),
        (TWO_NODES, {"train": {"device_mapping": [0]}, "infer": {"device_mapping": [0, 1]}}),
        (TWO_NODES, {"train": {"device_mapping": [0, 1]}, "infer": engine(2, device_mapping=[0, 1])}),
        (ONE_GPU, {"train": {"device": "cpu"}}),
        (ONE_GPU, {"infer": {"device": "cpu"}}),
        (ONE_GPU, {"infer": {"app": "offbeat-engine"}}),
        (ONE_GPU, {"infer": {"strategy_args": {"strategy_name": "sglang"}}}),
        (ONE_GPU, {"control": {"learner": "external"}}),
        (ONE_GPU, {"weights": {"url": "s3://bucket/weights", "transport": "fs"}}),
        (ONE_GPU, {"weights": {"anchor_every": 4}}),
        (ONE_GPU, {"weights": {"transport": "shm"}}),
        (
            ONE_GPU,
            {
                "train": {"model_args": {"lora_target": "all-linear", "lora_rank": 8}},
                "infer": {"strategy_args": {"strategy_config": {"max_lora_rank": 8}}},
            },
        ),
    ],
)
def test_others_keep_files(nodes: list[ClusterNode], keys: dict[str, Any]) -> None:
    run = config(**keys)
    assert transport(run, nodes) == run.weights.transport != "ipc"


def test_the_choice_stays_when_gpus_are_added_before_a_restart() -> None:
    """Engine and learner start at different times, and each plans: both find the one device again."""
    saved = validate_tree(choose_transport(config(), ONE_GPU).model_dump(mode="json"))
    assert saved.actor_infer.device_mapping == saved.actor_train.device_mapping == (0,)
    assert transport(saved, TWO_NODES) == "ipc"
    assert plan_devices(saved, TWO_NODES).engines == (EngineDevices("a", (0,), is_shared=True),)
    assert list(check_devices(saved, TWO_NODES)) == []
    saved = validate_tree(choose_transport(config(), TWO_NODES).model_dump(mode="json"))
    assert transport(saved, ONE_GPU) == "shm"


def test_the_mapping_is_that_of_the_plan() -> None:
    """A reference of its own takes the last GPU."""
    nodes = [ClusterNode("a", "10.0.0.1", 1), ClusterNode("b", "10.0.0.2", 1)]
    run = config(None, {"device_mapping": [1]}, num_gpus_per_node=1)
    assert choose_transport(run, nodes).weights.transport == "shm", "the learner takes the other GPU"
    first = choose_transport(config(**scored()), nodes)
    assert (first.actor_infer.device_mapping, first.actor_train.device_mapping) == ((0,), (0,))
    assert plan_devices(first, nodes) == plan_devices(config(**scored()), nodes)


@pytest.mark.parametrize(("gib", "chosen"), [(None, "ipc"), (80.0, "ipc"), (16.0, "shm")])
def test_a_gpu_without_room_for_the_versions_keeps_files(gib: float | None, chosen: str, tmp_path: Path) -> None:
    """A default never refuses a run that fits by shared memory."""
    nodes = [ONE_GPU[0]._replace(memory_gib=gib)]
    run = choose_turns(config(max_staleness=0, pretrain=write_model(tmp_path, 750_000_000)), nodes)
    assert transport(run, nodes) == chosen
    assert list(check_devices(choose_transport(run, nodes), nodes)) == []


@pytest.mark.parametrize("is_windows", [False, True])
def test_a_machine_with_one_gpu_gets_its_transport(
    is_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`offbeat config show` and `train` take the loaded run."""
    if is_windows:
        monkeypatch.setattr(gpu_memory, "WSL_GPU", tmp_path)
    monkeypatch.setattr(device_checks, "count_gpus", lambda: 1)
    monkeypatch.setattr(device_checks, "read_memory_gib", lambda: 80.0)
    on_gpu = ("actor_train.device=cuda", "actor_infer.device=cuda", f"output_dir={tmp_path / 'run'}")
    assert load_run(QUICKSTART, on_gpu).weights.transport == ("shm" if is_windows else "ipc")
    assert load_run(QUICKSTART, on_gpu[2:]).weights.transport == "shm"


@pytest.mark.parametrize(("name", "is_refused"), [("shm", True), ("fs", True), ("nccl", False)])
def test_quantized_weights_that_the_file_would_differ_from_are_refused(name: str, *, is_refused: bool) -> None:
    quantized = {"strategy_args": {"strategy_config": {"quantization": "fp8"}}}
    issues = list(check_devices(config(infer=quantized, weights={"transport": name}), TWO_NODES))
    path = "actor_infer.strategy_args.strategy_config.quantization"
    assert [issue.path for issue in issues] == [path] * is_refused
    assert all("nccl, or ipc" in issue.message for issue in issues)


@pytest.mark.parametrize(
    ("name", "nodes", "keys", "is_refused"),
    [
        ("nccl", ONE_GPU, {}, True),
        ("nccl", TWO_NODES, {}, False),
        ("nccl", TWO_NODES, {"train": {"device_mapping": [1]}, "infer": {"device_mapping": [0, 1]}}, True),
        ("ipc", ONE_GPU, {}, False),
        ("ipc", TWO_NODES, {}, True),
        ("ipc", TWO_NODES, {"train": {"device_mapping": [1]}, "infer": {"device_mapping": [0, 1]}}, True),
        ("ipc", TWO_NODES, {"train": {"device_mapping": [0, 1]}, "infer": {"device_mapping": [0, 1]}}, True),
        ("ipc", TWO_NODES, {"control": {"learner": "external"}}, False),
        ("ipc", TWO_NODES, {"infer": {"app": "generation-shared"}}, False),
    ],
)
def test_a_transport_that_the_devices_do_not_allow_is_refused(
    name: str, nodes: list[ClusterNode], keys: dict[str, Any], *, is_refused: bool
) -> None:
    issues = list(check_devices(config(weights={"transport": name}, **keys), nodes))
    assert [issue.path for issue in issues] == ["weights.transport"] * is_refused
