"""`offbeat bench learner`: tokens/s (without padding) and peak memory of an optimizer step, against a bare loop and
TRL.

Invariant: sides train one model on one batch in separate processes, in turn.
"""

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.learner_backends import (
    GROUP,
    READY,
    STEP,
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


class LearnerSideError(Exception):
    """Early exit of a side."""


def run(options: LearnerOptions) -> dict[str, Any]:
    """Measure equal, ragged and long-prompt sequences."""
    sides = ["offbeat", "bare", *(["trl"] if importlib.util.find_spec("trl") else [])]
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        model = str(options.model) if options.model else _make_model(Path(folder) / "model", options)
        batches: dict[str, Any] = {}
        equal = [options.longest] * options.sequences
        long_prompt = options.longest * (LENGTH_PER_ANSWER - 1) // LENGTH_PER_ANSWER
        for name, lengths, prompt in (
            ("equal", equal, PROMPT),
            ("ragged", _ragged(options), PROMPT),
            ("long prompts", equal, long_prompt),
        ):
            task = BackendTask(model, lengths, prompt, options.budget, options.threads, 1, options.device)
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
    """Return log-spaced lengths, shuffled per group."""
    rng = random.Random(1)
    count = options.sequences
    lengths = [round(SHORTEST * (options.longest / SHORTEST) ** (i / max(1, count - 1))) for i in range(count)]
    rng.shuffle(lengths)
    return lengths


def _make_model(folder: Path, options: LearnerOptions) -> str:
    import torch

    from offbeat.benchmarks.weights import SHAPES
    from offbeat.trainer.config.learner import ModelArgs
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
        running = {side: stack.enter_context(_side(side, task)) for side in sides}
        for number in range(-1, steps):
            for side, process in running.items():
                if number % 5 == 0:
                    console().print(f"{side}: step {number + 1} of {steps}")
                took = _step(process)
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


@contextmanager
def _side(side: str, task: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "offbeat.benchmarks.learner_backends", side, str(task)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    log = task.with_name(f"{side}.log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=task.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        _read(process, READY, log)
        yield process
    finally:
        process.kill()
        process.communicate()


def _step(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # how it ended is told below
        process.stdin.write("\n")
        process.stdin.flush()
    return json.loads(_read(process, STEP))


def _read(process: "subprocess.Popen[str]", word: str, log: Path | None = None) -> str:
    """Return the rest of the next `word` line."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    tail = log.read_text().strip().splitlines()[-3:] if log else []
    raise LearnerSideError(f"{cast(list[str], process.args)[3]} ended early: {' '.join(tail) or process.wait()}")


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
    """Return why the options are invalid, or ""."""
    if options.sequences % GROUP:
        return f"{options.sequences} sequences are no whole number of groups of {GROUP}"
    if options.longest < SHORTEST:
        return f"the longest sequence has {options.longest} tokens: take at least {SHORTEST}"
    return ""
