"""Many adapters inside vLLM's worker, also of the output embeddings."""

# pyright: basic
from vllm.model_executor.models.interfaces import SupportsLoRA

from offbeat.services.generation.vllm.lora import score_by_adapter
from offbeat.services.generation.vllm.worker import WorkerExtension

# Qwen's models, unlike Llama's, don't name their output embeddings for adapters
SupportsLoRA.embedding_modules = {"lm_head": "output_embeddings"}


class AdapterWorkerExtension(WorkerExtension):
    """Mixin of vLLM's worker for `VllmAdapterEngine`."""

    def prepare_adapters(self) -> None:
        """Call once, before the first request."""
        score_by_adapter(self.model_runner)
