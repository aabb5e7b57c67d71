"""Worker extension that times the engine's steps; vLLM imports it in the engine's process alone."""

from offbeat.benchmarks.turn.engine_parts import measure_engine
from offbeat.services.generation.vllm.worker import WorkerExtension


class MeasuredWorker(WorkerExtension):
    """Worker extension of the generation service, with timed steps."""


measure_engine()
