"""Environment and arguments of vLLM's engine."""

# pyright: basic
from pathlib import Path
from typing import Any, get_args

from offbeat.services.chat.vision import reads_images
from offbeat.services.generation.config import ROUTED_EXPERTS, UTILIZATION, GenerationConfig
from offbeat.services.malloc import keep_freed_memory

WORKER_EXTENSION = "offbeat.services.generation.vllm.worker.WorkerExtension"
SCHEDULER = "offbeat.services.generation.vllm.stops.make_scheduler"
RECORDS_ROUTING = "offbeat_records_routing"
"""In vLLM's `additional_config`, on CPUs, where vLLM refuses `ROUTED_EXPERTS`."""
PRIMITIVES = 512
"""Matrix products that oneDNN keeps compiled, 256 KiB each. Its default, 1024, doubles memory; 128 doubled the time of
small batches.
"""
CPU_BLOCK_SIZE = 32
"""Tokens of a cache block on a CPU, or a multiple."""


def engine_environment(config: GenerationConfig) -> dict[str, str]:
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Setting its log up, vLLM closes every handler of the process, those of Serve too; when Serve's controller came back
        # after its death, it then took each replica for broken and replaced it.
        "VLLM_CONFIGURE_LOGGING": "0",
    }
    if config.device == "cpu":
        environment |= {"OMP_NUM_THREADS": str(max(1, round(config.cpus_per_replica)))}
        environment |= keep_freed_memory()
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(PRIMITIVES)}
        if config.enforces_eager:
            # vLLM compiles the rank of sampled tokens even then, for 1 s of CPU at each start and 20 s of g++ at a machine's
            # first, and is no faster with it at 64 sequences.
            environment |= {"TORCH_COMPILE_DISABLE": "1"}
        if config.engine.world_size == 1:
            # The model then runs in the scheduler's own process: one import of torch and vLLM less when the engine starts,
            # and no message between processes in every step.
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return environment


def engine_arguments(config: GenerationConfig, model: Path, sequence_length: int, seed: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": config.model_args.dtype or "auto",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": seed,
        "max_model_len": config.engine.max_model_len or sequence_length,
        "max_num_seqs": config.engine.max_num_seqs,
        "tensor_parallel_size": config.engine.tensor_parallel_size,
        "pipeline_parallel_size": config.engine.pipeline_parallel_size,
        "enforce_eager": config.enforces_eager,
        "enable_prefix_caching": config.engine.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "scheduler_cls": SCHEDULER,
        # In a placement group vLLM would take Ray's executor
        "distributed_executor_backend": "uni" if config.engine.world_size == 1 else "mp",
    }
    if not reads_images(model, config.model_args.image_input):
        arguments |= {"language_model_only": True}  # of a multimodal model, which then has no other weights
    else:
        # pixels come normalised: vLLM would do it again for a folder that names a mean, as those of real models do
        arguments |= {"skip_mm_profiling": True, "mm_processor_cache_gb": 0, "mm_device_do_normalize": False}
    if config.engine.max_lora_rank is not None:
        from vllm.config.lora import MaxLoRARanks

        room = min(rank for rank in get_args(MaxLoRARanks) if rank >= config.engine.max_lora_rank)
        slots = config.engine.max_loras
        arguments |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": room}
    given = config.engine.model_extra or {}
    if config.device == "cpu":
        size = given.get("block_size")
        blocks = -(-size // CPU_BLOCK_SIZE) if isinstance(size, int) and size > 0 else 1
        given = {**given, "block_size": blocks * CPU_BLOCK_SIZE}
        arguments |= {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
        if config.returns_routing:
            given = {name: value for name, value in given.items() if name != ROUTED_EXPERTS}
            others: Any = given.get("additional_config") or {}
            given["additional_config"] = {**others, RECORDS_ROUTING: True}
    else:
        arguments |= {
            "gpu_memory_utilization": config.engine.gpu_memory_utilization or UTILIZATION,
            "enable_sleep_mode": bool(config.engine.enable_sleep_mode),
        }
    return arguments | given


def extension_arguments(config: GenerationConfig) -> dict[str, Any]:
    """Return the arguments of `WorkerExtension`, which engines with weights of their own lack."""
    arguments: dict[str, Any] = {"worker_extension_cls": WORKER_EXTENSION}
    if config.device == "cpu" and config.enforces_eager:  # else the compiler makes one kernel of the operations
        from offbeat.services.generation.vllm import cpu_kernels

        cpu_kernels.register()
        arguments["ir_op_priority"] = cpu_kernels.PRIORITY
    return arguments
