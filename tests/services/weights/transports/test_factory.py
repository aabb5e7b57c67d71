from pathlib import Path

import pytest
import torch

from offbeat.services.errors import WeightsError
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import file_name
from offbeat.services.weights.transports.factory import cleanup, make_transport, remove_all
from offbeat.services.weights.transports.shm import SharedMemoryTransport


def test_removing_a_run_leaves_runs_whose_name_starts_alike(tmp_path: Path) -> None:
    short, long = SharedMemoryTransport("a", tmp_path), SharedMemoryTransport("a-v1", tmp_path)
    for transport in (short, long):
        transport.stage(1, 1, {"x": torch.ones(1)})
    (tmp_path / (file_name("a", 2, 1) + ".part")).write_bytes(b"half")
    assert remove_all(short) == 2
    assert len(long.stored()) == 1


def test_runs_of_one_name_in_two_folders_keep_their_weights_apart(tmp_path: Path) -> None:
    config = WeightsConfig(transport="fs", url=str(tmp_path / "bucket"))
    one, other = (make_transport(config, "own", tmp_path / folder) for folder in ("one", "other"))
    mine, others = (each.stage(1, 1, {"x": torch.ones(1)}) for each in (one, other))
    assert [file.location for file in one.stored()] == [mine.location]
    with pytest.raises(WeightsError, match="no weight file"):
        one.delete(others.location)
    assert cleanup("own", config, tmp_path / "one") == 1
    assert [file.location for file in other.stored()] == [others.location]


def test_what_a_killed_command_left_is_found_by_the_next_one_of_its_folder(tmp_path: Path) -> None:
    config = WeightsConfig(transport="fs", url=str(tmp_path / "bucket"))
    make_transport(config, "own", tmp_path / "runs/own").stage(1, 1, {"x": torch.ones(1)})
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert cleanup("own", config, tmp_path / "link/own") == 1


def test_a_transport_that_needs_a_gpu_is_refused_on_a_cpu(tmp_path: Path) -> None:
    for name in ("ipc", "nccl"):
        config = WeightsConfig.model_validate_json(f'{{"transport": "{name}"}}')
        with pytest.raises(WeightsError, match="needs a GPU"):
            make_transport(config, "run", tmp_path)
