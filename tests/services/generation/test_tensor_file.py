"""What is read is the file, and reading it leaves nothing behind."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offbeat.services.generation.tensor_file import DTYPES, TensorFile

pytestmark = pytest.mark.slow


def test_every_dtype_and_shape_is_read_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    written = {f"of {name}": (10 * torch.rand(3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    written |= {"one": torch.tensor(3.5), "none": torch.zeros(0, 4), "flat": torch.arange(7)}
    save_file(written, tmp_path / "x", metadata={"format": "pt"})
    with TensorFile(tmp_path / "x") as file:
        assert set(file.names()) == set(written)
        for name, tensor in file.items():
            assert tensor.dtype is written[name].dtype
            assert tensor.shape == written[name].shape
            assert bytes(tensor.flatten().view(torch.uint8)) == bytes(written[name].flatten().view(torch.uint8)), name


@pytest.mark.parametrize("padding", range(8))
def test_headers_of_any_length_are_read(tmp_path: Path, padding: int) -> None:
    """Early writers of safetensors padded none."""
    written = {f"of {name}": torch.arange(6).view(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    save_file(written, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" " * padding
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with TensorFile(tmp_path / "x") as file:
        for name, tensor in file.items():
            assert torch.equal(tensor.double(), written[name].double())


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    save_file({"x": torch.arange(1000)}, tmp_path / "x")
    with TensorFile(tmp_path / "x") as file:
        kept = file.get_tensor("x")
    (tmp_path / "x").unlink()
    gc.collect()
    assert torch.equal(kept, torch.arange(1000))


def test_reading_leaves_no_object_behind(tmp_path: Path) -> None:
    save_file({f"{i}": torch.zeros(300, 7) for i in range(20)}, tmp_path / "x")

    def left(times: int) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(times):
            with TensorFile(tmp_path / "x") as file:
                for _ in file.items():
                    pass
        gc.collect()
        return sys.getallocatedblocks() - before

    left(20)
    assert left(200) < 1000, "safetensors itself leaves 7,800"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}, "does not fit"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}, "does not fit"),
        ({"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}, "does not fit"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, "does not fit"),
        ({"dtype": "Q3", "shape": [4], "data_offsets": [0, 16]}, "Q3"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(tmp_path: Path, entry: dict[str, object], complaint: str) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with TensorFile(tmp_path / "x") as file, pytest.raises(ValueError, match=complaint):
        file.get_tensor("x")


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 8 + b"{}", (5).to_bytes(8, "little") + b"[1,2]"[:3]])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="no safetensors file"):
        TensorFile(tmp_path / "x")
