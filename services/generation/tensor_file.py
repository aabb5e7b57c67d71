"""Safetensors reader; `safetensors.safe_open` (0.8.0, PyTorch) leaks an integer per tensor."""

# pyright: basic
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

LENGTH = 8
MAX_HEADER_BYTES = 100 << 20
"""As in safetensors."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile:
    def __init__(self, path: str | Path) -> None:
        """Raises ValueError for another file, OSError if unreadable."""
        size = Path(path).stat().st_size
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(LENGTH), "little")
            if not 0 < length <= min(size - LENGTH, MAX_HEADER_BYTES):
                raise ValueError(f"{path} is no safetensors file: a header of {length} bytes in {size}")
            self._entries: dict[str, dict[str, Any]] = json.loads(file.read(length))
        self._entries.pop("__metadata__", None)
        storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)[LENGTH + length :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._entries:
            yield name, self.get_tensor(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a view of the file, which stays open while the tensor exists, or a copy if it is not aligned there.

        Raises:
            ValueError: its entry does not fit the file. KeyError: there is none.
        """
        entry = self._entries[name]
        dtype, shape, (start, end) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        if dtype is None:
            raise ValueError(f"{name} is of {entry['dtype']}, which can't be read")
        if not 0 <= start <= end <= len(self._bytes) or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{name}: {entry['dtype']} of shape {shape} at bytes {start} to {end} does not fit the file"
            )
        content = self._bytes[start:end]
        if content.storage_offset() % dtype.itemsize:  # of early writers, which aligned nothing
            content = content.clone()
        return content.view(dtype).view(shape)
