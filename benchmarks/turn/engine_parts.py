"""Parts of vLLM's steps, in the engine's process."""

import os
from pathlib import Path

from offbeat.benchmarks.turn.part_times import PartTimes

EXTENSION = "offbeat.benchmarks.turn.measured_worker.MeasuredWorker"
FILE = "OFFBEAT_BENCH_ENGINE_PARTS"
"""Environment variable: file for the times."""
ENGINE_PARTS = ("schedule", "prepare", "forward", "sample", "output")


def measure_engine() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    parts = PartTimes(Path(os.environ[FILE]), ENGINE_PARTS)
    parts.measure(Scheduler, "schedule", "schedule")
    parts.measure(Scheduler, "update_from_output", "output")
    parts.measure(GPUModelRunner, "execute_model", "prepare")
    parts.measure(GPUModelRunner, "_model_forward", "forward")
    parts.measure(GPUModelRunner, "sample_tokens", "sample")
