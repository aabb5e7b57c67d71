"""Loading of a version into a twin of the model between engine steps, then an exchange of pointers.

Invariant: the serving model changes only in `exchange`, after a complete version was compared with its file.
"""

# pyright: basic
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.platforms import current_platform

from offbeat.services.generation.checkpoint_names import engine_tensors
from offbeat.services.generation.tensor_file import TensorFile
from offbeat.services.generation.vllm.loading import compare, finish_reload

SLICE_S = (0.002, 0.05)
"""Shortest and longest slice; between, half of the time since the last."""
LAYER = ".layers."
ABSENT = object()


def can_stage(config: VllmConfig) -> bool:
    """Return whether the model is unquantized, uncompiled and in main memory."""
    whole = config.parallel_config.world_size == 1 and config.model_config.quantization is None
    return current_platform.is_cpu() and whole and config.model_config.enforce_eager


class Staging:
    def __init__(self, model: Any, config: VllmConfig) -> None:
        self._config = config
        self._twin: Any = _make_twin(model, {}, {})
        self._pairs = list(zip(model.modules(), self._twin.modules(), strict=True))
        for module, twin in self._pairs:
            parameters, buffers = get_layerwise_info(module).restore_metadata
            get_layerwise_info(twin).restore_metadata = (_on_meta(parameters), _on_meta(buffers))
        self._work: Iterator[None] | None = None
        self._changes: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        self._slice_ended = 0.0

    def begin(self, path: str) -> None:
        self._changes = []
        self._work = self._reload(path)
        self._slice_ended = time.monotonic()

    def stage_next(self) -> bool:
        """Stage one slice; return True once complete.

        Raises:
            LoadError: file and model differ.
        """
        assert self._work is not None
        began = time.monotonic()
        share = min(max(began - self._slice_ended, SLICE_S[0]), SLICE_S[1])
        with set_current_vllm_config(self._config), torch.no_grad():
            while time.monotonic() < began + share and next(self._work, ABSENT) is not ABSENT:
                pass
        self._slice_ended = time.monotonic()
        return bool(self._changes)

    def switch(self) -> bool:
        """Exchange parameters with the twin; return False if none is staged."""
        changes, self._changes, self._work = self._changes, [], None
        for mine, theirs, name in changes:
            old, new = mine.pop(name, ABSENT), theirs.pop(name, ABSENT)
            if new is not ABSENT:
                mine[name] = new
            if old is not ABSENT:
                theirs[name] = old
        return bool(changes)

    def _reload(self, path: str) -> Iterator[None]:
        twin = self._twin
        expected = {name for name, _ in twin.named_parameters()}
        before = [dict(vars(each)) for _, each in self._pairs]
        initialize_layerwise_reload(twin)
        yield
        loaded: set[str] = set()
        with TensorFile(path) as file:
            for names in _by_layer(file.names()):
                tensors = ((name, file.get_tensor(name)) for name in names)
                loaded |= set(twin.load_weights(engine_tensors(self._config.model_config.hf_config, tensors)))
                yield
            finish_reload(twin, self._config.model_config, expected, loaded)
            yield
            yield from compare(twin, file)
        self._changes = [
            (vars(module), vars(each), name)
            for (module, each), old in zip(self._pairs, before, strict=True)
            for name in _changed(old, vars(each))
        ]


def _on_meta(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: to_meta_tensor(tensor) for name, tensor in tensors.items()}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    names = {name for name in before.keys() | after.keys() if before.get(name, ABSENT) is not after.get(name, ABSENT)}
    return names | {"_parameters", "_buffers"}


def _by_layer(names: Iterable[str]) -> Iterator[list[str]]:
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        prefix, layer, rest = name.partition(LAYER)
        layers[f"{prefix}{layer}{rest.partition('.')[0]}" if layer else name].append(name)
    yield from layers.values()


def _make_twin(module: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, torch.Tensor]) -> nn.Module:
    """Return a copy that shares all but tensors and submodules."""
    if id(module) not in modules:
        twin = modules[id(module)] = object.__new__(type(module))
        own = vars(twin)
        own |= vars(module)
        own["_parameters"] = {name: _copy_of(tensor, tensors) for name, tensor in module._parameters.items()}
        own["_buffers"] = {name: _copy_of(tensor, tensors) for name, tensor in module._buffers.items()}
        own["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        own["_modules"] = {
            name: child if child is None else _make_twin(child, modules, tensors)
            for name, child in module._modules.items()
        }
    return modules[id(module)]


def _copy_of(tensor: torch.Tensor | None, copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in copies:
        copy = copies[id(tensor)] = tensor.data.clone()
        copy.__class__ = tensor.__class__
        vars(copy).update(vars(tensor))
    return copies[id(tensor)]
