"""`offbeat bench learner`: tokens/s (without padding) and peak memory of an optimizer step, against a bare loop and
TRL.

Invariant: sides train one model on one batch in separate processes, in turn.
"""

import importlib.util
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.pace import PacedProcess, PacedSideError
from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.learner_backends import (
    GROUP,
    BackendTask,
)

PROMPT = 16
SHORTEST = 32
LENGTH_PER_ANSWER = 8
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    model: Path | None = None
    """Hugging Face folder; None: random weights of `size`."""
    size: str = "1M"
    sequences: int = 32
    longest: int = 256
    vocabulary: int = 8192
    budget: int = 2048
    steps: int = 5
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"


def run(options: LearnerOptions) -> dict[str, Any]:
    """Measure equal, ragged and long-prompt sequences."""
    sides = ["offbeat", "bare", *(["trl"] if importlib.util.find_spec("trl") else [])]
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        model = str(options.model) if options.model else make_model(Path(folder) / "model", options)
        batches: dict[str, Any] = {}
        equal = [options.longest] * options.sequences
        long_prompt = options.longest * (LENGTH_PER_ANSWER - 1) // LENGTH_PER_ANSWER
        for name, lengths, prompt in (
            ("equal", equal, PROMPT),
            ("ragged", _ragged(options), PROMPT),
            ("long prompts", equal, long_prompt),
        ):
            task = BackendTask(
                model, lengths, prompt, options.budget, options.threads, 1, options.device, options.dtype
            )
            task.write(Path(folder) / "task.json")
            present = ["offbeat", "shared", *sides[1:]] if prompt == long_prompt else sides
            batches[name] = _measure(present, Path(folder) / "task.json", sum(lengths), options.steps)
    result = {
        "batches": batches,
        "left_out": [] if "trl" in sides else ["trl: it is not installed (the dev extra has it)"],
    }
    _show(result)
    return result


def _ragged(options: LearnerOptions) -> list[int]:
    rng = random.Random(1)
    count = options.sequences
    lengths = [round(SHORTEST * (options.longest / SHORTEST) ** (i / max(1, count - 1))) for i in range(count)]
    rng.shuffle(lengths)
    return lengths


def make_model(folder: Path, options: LearnerOptions) -> str:
    import torch

    from offbeat.benchmarks.weights import SHAPES
    from offbeat.trainer.config.actor_train import ModelArgs
    from offbeat.trainer.models.loading import load_policy
    from offbeat.trainer.models.tiny import write_tiny_policy

    shape = SHAPES[options.size].model_copy(update={"max_position_embeddings": max(512, options.longest)})
    write_tiny_policy(folder, shape, [f"w{i}" for i in range(options.vocabulary - 8)])
    torch.set_num_threads(options.threads)
    load_policy(folder, ModelArgs(attn_implementation="sdpa"), seed=1).model.save_pretrained(folder)
    return str(folder)


def _measure(sides: list[str], task: Path, num_tokens: int, steps: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peak: dict[str, int] = {}
    with ExitStack() as stack:
        running = {side: stack.enter_context(_start(side, task)) for side in sides}
        for number in range(-1, steps):
            for side, process in running.items():
                if number % 5 == 0:
                    console().print(f"{side}: step {number + 1} of {steps}")
                took = process.step()
                if number >= 0:  # the first one compiles and allocates
                    seconds[side].append(took["seconds"])
                    peak[side] = took["bytes"]
    ours = statistics.median(seconds["offbeat"])
    return {
        "tokens": num_tokens,
        "sides": {
            side: {
                "tokens_per_s": Spread.of(num_tokens / step_s for step_s in seconds[side]),
                "peak_mib": peak[side] / MIB,
                "ratio": statistics.median(seconds[side]) / ours,
            }
            for side in sides
        },
    }


def _start(side: str, task: Path) -> PacedProcess:
    command = [sys.executable, "-m", "offbeat.benchmarks.learner_backends", side, str(task)]
    process = PacedProcess(
        side, command, task.parent, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    )
    try:
        process.wait_until_ready()
    except PacedSideError:
        process.close()
        raise
    return process


def _show(result: dict[str, Any]) -> None:
    rows = [
        (name, side, measured["tokens_per_s"].median, measured["tokens_per_s"].low, measured["tokens_per_s"].high,
         measured["ratio"], measured["peak_mib"])
        for name, batch in result["batches"].items()
        for side, measured in batch["sides"].items()
    ]  # fmt: skip
    columns = ("lengths", "side", "tokens/s", "lowest", "highest", "offbeat is x faster", "peak MiB")
    show("An optimizer step", columns, rows)
    for line in result["left_out"]:
        console().print(line)


def check(options: LearnerOptions) -> str:
    if options.sequences % GROUP:
        return f"{options.sequences} sequences are no whole number of groups of {GROUP}"
    if options.longest < SHORTEST:
        return f"the longest sequence has {options.longest} tokens: take at least {SHORTEST}"
    return ""
