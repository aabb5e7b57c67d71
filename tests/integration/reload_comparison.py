"""`python reload_comparison.py FOLDER...`: what a comparison after a reload misses, a line of JSON for each folder.

Loads FOLDER/version.safetensors into vLLM's model of FOLDER as a replica does; then says which of the file's tensors may
differ unnoticed.
"""

# pyright: basic
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.tensor_file import TensorFile
from offbeat.services.generation.vllm.arguments import engine_arguments, engine_environment


class OneDiffers:
    """A file of which one tensor has other values."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def names(self) -> list[str]:
        return list(self._file.names())

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._file.get_tensor(name)
        return tensor + 0.1 * tensor.abs().max() + 0.1 if name == self._name else tensor


def build(folder: Path) -> tuple[Any, Any]:
    """vLLM's model and its settings, without an engine around it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = engine_arguments(GenerationConfig(model_args=EngineModelArgs(dtype="float32")), folder, 256, 1)
    config = AsyncEngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as meeting:
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{meeting}/here", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config), config


def unnoticed(model: Any, file: Any) -> list[str]:
    """Tensors of the file that could be other ones."""
    from offbeat.services.generation.vllm.loading import LoadError, compare

    found: list[str] = []
    with torch.no_grad():
        for name in file.names():
            try:
                for _ in compare(model, OneDiffers(file, name)):  # pyright: ignore[reportArgumentType]
                    pass
                found.append(name)
            except LoadError:
                continue
    return found


def look(folder: Path) -> dict[str, Any]:
    """Of one model."""
    from offbeat.services.generation.vllm.staging import Staging

    model, config = build(folder)
    path = folder / "version.safetensors"
    staging = Staging(model, config)
    staging.begin(str(path))
    while not staging.stage_next():
        pass
    staging.switch()
    with TensorFile(path) as file:
        return {"tensors": len(list(file.names())), "unnoticed": unnoticed(model, file)}


def main(folders: list[Path]) -> None:
    os.environ.update(engine_environment(GenerationConfig()))
    import offbeat.services.generation.vllm.worker  # noqa: F401 (registers models that read images)

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    for folder in folders:
        sys.stdout.write(json.dumps(look(folder)) + "\n")


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
