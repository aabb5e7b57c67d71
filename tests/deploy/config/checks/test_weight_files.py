"""The weights of a model's folder are those that transformers loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offbeat.deploy.config.checks.memory import count_weights
from offbeat.deploy.config.checks.weight_files import weight_shapes

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(folder: Path, *files: str) -> None:
    for number, name in enumerate(files):
        save_file({f"layers.{number}.weight": torch.zeros(2, 3)}, folder / name)


@pytest.mark.parametrize("files", [("model.safetensors",), SHARDS])
def test_a_second_copy_of_all_weights_is_not_counted(files: tuple[str, ...], tmp_path: Path) -> None:
    """Mistral's repositories hold `consolidated.safetensors` beside the files of transformers."""
    write(tmp_path, *files, "consolidated.safetensors")
    assert count_weights(str(tmp_path)) == 6 * len(files)
    names = {f"layers.{number}.weight": name for number, name in enumerate(files)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    write(tmp_path, *files, "another_copy.safetensors")
    assert count_weights(str(tmp_path)) == 6 * len(files)


@pytest.mark.parametrize("index", ["{}", "[]", "not JSON", '{"weight_map": {"a": "absent.safetensors"}}'])
def test_an_index_that_can_not_be_used_is_an_error(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises((OSError, ValueError)):
        list(weight_shapes(tmp_path))
    assert count_weights(str(tmp_path)) == 0
