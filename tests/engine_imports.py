"""What an engine process of vLLM imports; `tests.forked_engines` forks it."""

import threading

from offbeat.services.process import uncollected_imports

with uncollected_imports():
    import vllm.model_executor.models.qwen2
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import offbeat.services.generation.vllm.stops
    import offbeat.services.generation.vllm.worker  # noqa: F401

assert threading.active_count() == 1, "forks have no other thread"
