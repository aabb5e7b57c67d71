"""Loads weight versions into the model, inside vLLM's worker process; from a file here, from a learner's GPU beside it.

Invariant: an update that does not raise has loaded every parameter of the model. What came from a file was compared with it:
exactly where parameters keep their form, by a probe where the CPU packs them.
"""

# pyright: basic
import ctypes
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

PR_SET_PDEATHSIG = 1
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Error of a probe through a packed matrix, over the largest value: rounding passes, another matrix does not."""


class LoadError(Exception):
    """The model does not hold what the file says."""


def finish_reload(model: Any, model_config: Any, expected: set[str], loaded: set[str]) -> None:
    """Put reloaded layers back to work.

    expected: the model's parameters when the reload began. loaded: those that got new values.

    Raises:
        LoadError: a parameter got none.
    """
    finalize_layerwise_reload(model, model_config)
    tied = _repack_tied_head(model) if model_config.hf_text_config.tie_word_embeddings else set[str]()
    missing = expected - loaded - tied
    if missing:
        raise LoadError(f"{len(missing)} parameters are not in this version, {sorted(missing)[0]} for one")


def _repack_tied_head(model: Any) -> set[str]:
    """Give a tied head the new embeddings; returns the names that it goes by. On a CPU a head's matrix is packed when it is
    loaded, and the layerwise reload leaves a tied one out: without this the old head would stay."""
    tables = {path: m for path, m in model.named_modules() if isinstance(m, VocabParallelEmbedding)}
    heads = {path: module for path, module in tables.items() if isinstance(module, ParallelLMHead)}
    (embedding,) = (module for path, module in tables.items() if path not in heads)
    for head in heads.values():
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)
    return {f"{path}.weight" for path in heads}


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One version: a safetensors file with Hugging Face names."""

    path: str


class FileWeightEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """vLLM's weight-transfer engine for a local file."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    model: Any

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Make the layers ready to take weights in checkpoint format."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load the file and compare the model with it.

        Raises:
            LoadError: a parameter got nothing, or something else than the file's values.
        """
        expected = {name for name, _ in self.model.named_parameters()}
        with safe_open(update_info.path, framework="pt") as file:
            loaded = self.model.load_weights(_tensors(file))
            finish_reload(self.model, self.model_config, expected, set(loaded))
            _compare(self.model, file)

    def finish_weight_update(self) -> None:
        """All is done in `receive_weights`, while the file is open."""

    def shutdown(self) -> None:
        """Nothing to let go of."""


def _tensors(file: safe_open) -> Iterator[tuple[str, torch.Tensor]]:
    for name in file.keys():  # noqa: SIM118 (not a dict)
        yield name, file.get_tensor(name)


def _compare(model: Any, file: safe_open) -> None:
    """Raises `LoadError` where the model differs from the file. What is split over several workers is left out."""
    names = set(file.keys())
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        prefix = f"{parent}." if parent else ""
        for kind, parameter in module.named_parameters(recurse=False):
            sources = [f"{prefix}{part}.{kind}" for part in fused.get(leaf, [leaf])]
            if path == "lm_head" and sources[0] not in names:
                sources = ["model.embed_tokens.weight"]
            absent = [name for name in sources if name not in names]
            if len(absent) == len(sources):
                continue  # goes by another name in the file; that it was loaded is checked
            if absent:
                raise LoadError(f"{absent[0]} is not in the file")
            wanted = torch.cat([file.get_tensor(name) for name in sources])
            if not _agrees(module, parameter, wanted):
                raise LoadError(f"{path}.{kind} differs from the file after loading")


def _agrees(module: Any, parameter: torch.Tensor, wanted: torch.Tensor) -> bool:
    if parameter.numel() == 0:
        return _probe_agrees(module, wanted.to(parameter.dtype))
    if parameter.shape[1:] != wanted.shape[1:] or parameter.shape[0] < wanted.shape[0]:
        return True  # one worker's part of it
    return torch.equal(parameter.data[: len(wanted)], wanted.to(parameter))


def _probe_agrees(module: Any, wanted: torch.Tensor) -> bool:
    """Whether a packed matrix maps a vector to what the file's matrix maps it to."""
    probe = torch.randn(1, wanted.shape[1], generator=torch.Generator().manual_seed(0)).to(wanted.dtype)
    found = module.quant_method.apply(module, probe).float()
    expected = torch.nn.functional.linear(probe.float(), wanted.float())
    if found.shape != expected.shape:
        return True
    return bool((found - expected).abs().max() <= TOLERANCE[wanted.dtype] * expected.abs().max())


class WorkerExtension:
    """Mixed into vLLM's worker; that its module is imported there registers the engine."""

    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def take_weights(self, update_info: dict[str, Any]) -> None:
        """A whole update in one call: each call more is a round trip during which nothing is sampled."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()

    def die_with_parent(self) -> None:
        """Have the kernel end this process when the replica that started it dies, however it dies."""
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


WeightTransferEngineFactory.register_engine("offbeat_file", FileWeightEngine)
for _backend, _class in (("offbeat_ipc", "IpcEngine"), ("offbeat_nccl", "NcclEngine")):
    WeightTransferEngineFactory.register_engine(_backend, "services.generation.device_engines", _class)
