"""Weight versions inside vLLM's worker, from a file or a learner's GPU.

Invariant: on success every parameter was loaded, and files are compared.
"""

# pyright: basic
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_worker import Worker

from offbeat.services.generation.checkpoint_names import engine_tensors
from offbeat.services.generation.tensor_file import TensorFile
from offbeat.services.generation.vllm import cpu_kernels, cpu_repairs
from offbeat.services.generation.vllm.cpu_routing import RoutingRecorder, records_routing
from offbeat.services.generation.vllm.loading import compare, finish_reload
from offbeat.services.generation.vllm.lora import (
    BASE,
    skip_vocabulary_layers,
    take_adapter,
    unwrap,
)
from offbeat.services.generation.vllm.sleeping import tolerate_memory_growth
from offbeat.services.generation.vllm.staging import Staging, can_stage
from offbeat.services.generation.vllm.without_torchvision import register_lazily
from offbeat.services.process import die_with_parent


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Version as a safetensors file with Hugging Face names."""

    path: str


class FileWeightEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    model: Any

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load the file and compare.

        Raises:
            LoadError: a parameter is missing or differs.
        """
        expected = {name for name, _ in self.model.named_parameters()}
        with TensorFile(update_info.path) as file:
            loaded = self.model.load_weights(engine_tensors(self.model_config.hf_config, file.items()))
            finish_reload(self.model, self.model_config, expected, set(loaded))
            for _ in compare(self.model, file):
                pass

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


class WorkerExtension:
    """Mixin of vLLM's worker; this module registers weight engines and vision models."""

    vllm_config: VllmConfig
    model_runner: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any
    _staging: Staging | None = None

    def stage_weights(self, path: str) -> bool:
        """Start staging; return False if the file must be loaded in a pause."""
        if self._staging is None and can_stage(self.vllm_config):
            self._staging = Staging(self.model_runner.get_model(), self.vllm_config)
        if self._staging is not None:
            self._staging.begin(path)
        return self._staging is not None

    def stage_more(self) -> bool:
        """Stage a slice; return True once complete. Raises `LoadError`."""
        assert self._staging is not None
        return self._staging.stage_next()

    def take_weights(self, update_info: dict[str, Any]) -> None:
        """Switch to the staged version, or load one; nothing may be sampled."""
        if self._staging is not None and self._staging.switch():
            return
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()

    def prepare_adapters(self) -> None:
        """Call once, before the first request."""
        runner = self.model_runner
        is_compiled = not runner.model_config.enforce_eager
        skip_vocabulary_layers(runner.get_model(), runner.lora_manager._adapter_manager, is_compiled=is_compiled)

    def take_adapter(self, folder: str) -> None:
        """Load an adapter, after its base if included; raises `LoadError`."""
        base = Path(folder, BASE)
        if base.exists():
            self.take_base(str(base))
        take_adapter(self.model_runner, Path(folder))

    def put_adapter(self, name: str, number: int, folder: str) -> None:
        """Load one of many adapters; raises `LoadError`."""
        take_adapter(self.model_runner, Path(folder), name, number)

    def take_base(self, path: str) -> None:
        """Load the weights below the adapters; raises `LoadError`."""
        with unwrap(self.model_runner.get_model()):
            self.take_weights({"path": path})

    def prepare(self) -> tuple[int, int]:
        """Make the kernel kill this process with its replica, and repair vLLM's operations; return `CacheGroups`."""
        die_with_parent()
        if current_platform.is_cpu():
            cpu_repairs.repair()
            if records_routing(self.vllm_config):
                RoutingRecorder(self.model_runner, self.vllm_config).attach()
        specs = [group.kv_cache_spec for group in self.model_runner.kv_cache_config.kv_cache_groups]
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        num_blocks = sum(spec.max_memory_usage_bytes(self.vllm_config) // spec.page_size_bytes for spec in states)
        return len(specs) - len(states), num_blocks


# vLLM's attention in bfloat16 uses AMX where the CPU has it, and does not ask Linux for it, which kills who uses it unasked
torch.cpu._init_amx()

WeightTransferEngineFactory.register_engine("offbeat_file", FileWeightEngine)
for _backend, _class in (("offbeat_ipc", "IpcEngine"), ("offbeat_nccl", "NcclEngine")):
    WeightTransferEngineFactory.register_engine(_backend, "offbeat.services.generation.vllm.gpu_transfer", _class)
register_lazily()
for _architecture, _class in (
    ("Qwen2VLForConditionalGeneration", "Qwen2VL"),
    ("Qwen2_5_VLForConditionalGeneration", "Qwen25VL"),
    ("Qwen3VLForConditionalGeneration", "Qwen3VL"),
    ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoe"),
    ("Qwen3_5ForConditionalGeneration", "Qwen35"),
    ("Qwen3_5MoeForConditionalGeneration", "Qwen35Moe"),
):
    ModelRegistry.register_model(_architecture, f"offbeat.services.generation.vllm.vision:{_class}")
Worker.sleep = tolerate_memory_growth(Worker.sleep)
cpu_kernels.register()
# vLLM collects garbage three times while it starts, and would walk all that was imported each time
gc.freeze()
