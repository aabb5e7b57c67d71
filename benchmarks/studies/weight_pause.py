"""Engine pause for a new version, staged in advance or loaded in the pause; the ways alternate.

python -m offbeat.benchmarks.studies.weight_pause [--size 1M] [--rounds 7]
"""

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from offbeat.benchmarks.weights import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    SEQUENCE_LENGTH,
    SHAPES,
)
from offbeat.envs.frozen_lake import WORDS
from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.engine import LoadTimes
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import GenerateRequest, Sampling
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy


async def keep_running(engine: VllmEngine, place: int, steps: list[float]) -> None:
    """Send requests; those of one version measure the engine's step."""
    draw = random.Random(place)
    for number in itertools.count():
        prompt = tuple(draw.randrange(16) for _ in range(PROMPT_TOKENS))
        began = time.monotonic()
        request = GenerateRequest(f"{place}-{number}", prompt, Sampling(max_new_tokens=ANSWER_TOKENS))
        completion = await engine.generate(request, 0)
        if len(completion.versions) == 1:
            steps.append((time.monotonic() - began) / len(completion.token_ids))


async def measure(folder: Path, files: list[Path], options: argparse.Namespace) -> None:
    config = GenerationConfig(model_args=EngineModelArgs(dtype="bfloat16"), kv_cache_gib=0.25)
    engine = await VllmEngine.start(config, folder, sequence_length=SEQUENCE_LENGTH, seed=0)
    steps: list[float] = []
    times: dict[str, list[LoadTimes]] = {"staged": [], "in the pause": []}
    try:
        await engine.stage(files[0])
        await engine.load(files[0], 0)
        running = [asyncio.create_task(keep_running(engine, place, steps)) for place in range(options.running)]
        while len(steps) < 2 * options.running:  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0.1)
        step_s = median(steps)
        for version in range(1, 2 * options.rounds + 1):
            kind = ("staged", "in the pause")[version % 2]
            file = files[version % len(files)]
            if kind == "staged":
                await engine.stage(file)
            times[kind].append(await engine.load(file, version))
            await asyncio.sleep(options.between)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        engine.close()
    show(options, step_s, times)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def show(options: argparse.Namespace, step_s: float, times: dict[str, list[LoadTimes]]) -> None:
    title = f"{options.size} parameters, {options.running} requests running, load {os.getloadavg()[0]:.0f}"
    table = Table(
        "loading", "pause, ms (median)", "longest", "loading, ms", "engine step, ms", "pause in steps", title=title
    )
    for kind, updates in times.items():
        pauses = [update.pause_s for update in updates]
        cells = (
            1e3 * median(pauses),
            1e3 * max(pauses),
            1e3 * median([update.load_s for update in updates]),
            1e3 * step_s,
        )
        table.add_row(kind, *(f"{cell:.1f}" for cell in cells), f"{median(pauses) / step_s:.1f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SHAPES), default="1M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--running", type=int, default=8, help="requests at a time")
    parser.add_argument("--between", type=float, default=0.5, help="s between two updates")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name) / "policy", [Path(name) / f"{i}.safetensors" for i in range(2)]
        folder.mkdir()
        write_tiny_policy(folder, SHAPES[options.size], WORDS)
        for seed, file in enumerate(files):
            state = load_policy(folder, ModelArgs(), seed=seed, temperature=1.0).model.state_dict()
            save_file({n: t.to(torch.bfloat16) for n, t in state.items() if n != "lm_head.weight"}, file)
        asyncio.run(measure(folder, files, options))


if __name__ == "__main__":
    main()
