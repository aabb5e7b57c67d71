"""State files with programs in them, as who hands on a checkpoint could make them."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.state_files import METADATA, StateFileError, StatePlanner, StateReader, load_tensors
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.learner_rank import SMOOTH
from tests.trainer.engines.payload import Payload

pytestmark = pytest.mark.slow

STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]
EngineFactory = Callable[..., TrainEngine[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_tiny_policy(path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    return path


@pytest.fixture
def engine(folder: Path, ranks: Ranks) -> EngineFactory:
    def build(stage: int | None, dtype: str = "float32") -> TrainEngine[Any]:
        policy = load_policy(folder, ModelArgs.model_validate({"dtype": dtype}), seed=1)
        if stage is None:
            return FSDP2Engine(policy, SMOOTH, ranks)
        return DeepSpeedEngine(policy, SMOOTH, StrategyArgs.model_validate({"zero_stage": stage}), ranks)

    return build


def poison(path: Path, payload: Payload) -> None:
    """Put a payload into DeepSpeed's file, beside what it holds."""
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict" if "optimizer_state_dict" in state else "lr_scheduler"] = payload
    torch.save(state, path)


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_program_in_any_file_of_deepspeeds_is_refused_and_not_run(
    engine: EngineFactory, stage: int, dtype: str, tmp_path: Path
) -> None:
    engine(stage, dtype).save(tmp_path / "state")
    files = sorted((tmp_path / "state" / "state").glob("*.pt"))
    assert len(files) == (1 if stage == 0 else 2)
    for number, file in enumerate(files):
        intact, ran = file.read_bytes(), tmp_path / f"ran-{number}"
        poison(file, Payload(ran))
        torch.load(file, weights_only=False)
        ran.rmdir()  # which shows that it was an attack
        with pytest.raises(StateFileError, match=rf"{file}.*names posix\.mkdir"):
            engine(stage, dtype).load(tmp_path / "state")
        assert not ran.exists()
        file.write_bytes(intact)
    engine(stage, dtype).load(tmp_path / "state")


def test_no_script_is_left_in_a_checkpoint(engine: EngineFactory, tmp_path: Path) -> None:
    engine(2).save(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".py"] == []


def test_a_universal_checkpoint_which_deepspeed_unpickles_itself_is_refused(
    folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    strategy = StrategyArgs.model_validate(
        {"zero_stage": 2, "strategy_config": {"checkpoint": {"load_universal": True}}}
    )
    engine = DeepSpeedEngine(load_policy(folder, ModelArgs(), seed=1), SMOOTH, strategy, ranks)
    with pytest.raises(RuntimeError, match="load_universal"):
        engine.load(tmp_path)


def test_a_program_in_the_metadata_of_fsdp2_is_refused_and_not_run(engine: EngineFactory, tmp_path: Path) -> None:
    state, ran = tmp_path / "state", tmp_path / "ran"
    engine(None).save(state)
    metadata = FileSystemReader(state).read_metadata()
    metadata.planner_data = Payload(ran)
    (state / METADATA).write_bytes(pickle.dumps(metadata))
    FileSystemReader(state).read_metadata()
    ran.rmdir()
    with pytest.raises(StateFileError, match=rf"{state / METADATA}.*names posix\.mkdir"):
        engine(None).load(state)
    assert not ran.exists()


def test_a_program_in_a_value_of_fsdp2_is_refused_and_not_run(engine: EngineFactory, tmp_path: Path) -> None:
    state, ran = tmp_path / "state", tmp_path / "ran"
    engine(None).save(state)
    metadata = FileSystemReader(state).read_metadata()
    value_name = "optimizer.param_groups.0.lr"
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == value_name]
    payload = io.BytesIO()
    torch.save(Payload(ran), payload)
    file = state / info.relative_path
    info.offset, info.length = file.stat().st_size, len(payload.getvalue())
    file.write_bytes(file.read_bytes() + payload.getvalue())
    (state / METADATA).write_bytes(pickle.dumps(metadata))
    engine(None).load(state)  # which reads tensors alone
    with pytest.raises(CheckpointException, match=r"param_groups\.0\.lr.*names posix\.mkdir"):
        load({value_name: 0.0}, storage_reader=StateReader(state), planner=StatePlanner())
    assert not ran.exists()


def test_metadata_of_fsdp2_names_no_file_outside_of_its_folder(engine: EngineFactory, tmp_path: Path) -> None:
    engine(None).save(tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = f"../{tmp_path.name}/{info.relative_path}"
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateFileError, match="outside of its folder"):
        engine(None).load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(["no", "state"])])
def test_a_damaged_state_file_is_named(engine: EngineFactory, content: bytes, tmp_path: Path) -> None:
    for stage, name in ((2, "state/mp_rank_00_model_states.pt"), (None, METADATA)):
        state = tmp_path / str(stage)
        engine(stage).save(state)
        (state / name).write_bytes(content)
        with pytest.raises(StateFileError, match=str(state / name)):
            engine(stage).load(state)


def test_a_program_in_place_of_safetensors_is_refused_and_not_run(tmp_path: Path) -> None:
    """The generators' states and the reference are such files."""
    file, ran = tmp_path / "rng-rank-00000.safetensors", tmp_path / "ran"
    torch.save(Payload(ran), file)
    with pytest.raises(StateFileError, match=str(file)):
        load_tensors(file)
    assert not ran.exists()
