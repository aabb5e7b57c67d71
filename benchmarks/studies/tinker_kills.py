"""Reinforcement learning by Tinker's SDK while the server's processes are killed, against the same commands undisturbed.

python -m offbeat.benchmarks.studies.tinker_kills --kills 20 --seed 1

Invariant: results of commands and the final checkpoint are equal to the bit, and a command counts once.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from offbeat.benchmarks.tinker.server import HTTP, LEARNER, REDIS, RunningServer, running_server

PARTS = LEARNER, HTTP, REDIS
PROMPT = (4, 9, 5)
NUM_SAMPLES, ANSWER_TOKENS = 4, 16
LONG_ANSWER_TOKENS = 64
"""Of a sample that runs beside a step's commands."""
SAVE_EVERY, LOAD_EVERY = 4, 10
MAX_DELAY_S = 1.0
"""Upper bound of the drawn time from a step's begin to a kill."""
MIN_STEPS = 12
"""Includes a load."""
POLL_S, RESTART_TIMEOUT_S = 0.05, 120.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step sent and received. data: sequences with their losses' inputs."""

    data: Sequence[Any]
    losses: tuple[float, ...]
    metrics: dict[str, float]
    """Of the optimizer step; `version` counts the weights' changes."""


@dataclass(frozen=True, slots=True)
class KillRun:
    """kills: module or program of each killed process."""

    model_id: str
    steps: Sequence[StepRecord]
    checkpoint: bytes
    kills: tuple[str, ...] = ()

    def differences(self, other: "KillRun") -> list[str]:
        """Return what differs from a run of the same commands."""
        pairs = enumerate(zip(self.steps, other.steps, strict=True))
        found = [
            f"step {i}: {one.losses}, {one.metrics} and {two.losses}, {two.metrics}"
            for i, (one, two) in pairs
            if (one.losses, one.metrics) != (two.losses, two.metrics)
        ]
        return found + (["the final checkpoint"] if self.checkpoint != other.checkpoint else [])

    def miscounted(self) -> list[str]:
        """Return the steps before which the weights did not change once per step and load."""
        expected = [i + 1 + i // LOAD_EVERY for i in range(len(self.steps))]
        versions = [step.metrics["version"] for step in self.steps]
        return [
            f"step {i}: version {v}, not {e}" for i, (v, e) in enumerate(zip(versions, expected, strict=True)) if v != e
        ]


class Killer:
    """Kills one process at a time, at a drawn moment, in a drawn order with each part equally often."""

    def __init__(self, server: RunningServer, kills: int, seed: int) -> None:
        self._server = server
        self._draw = random.Random(seed)
        self._left = [PARTS[i % len(PARTS)] for i in range(kills)]
        self._draw.shuffle(self._left)
        self._thread = ThreadPoolExecutor(1, "killer")
        self._next: Future[None] | None = None
        self.killed: list[str] = []

    @property
    def is_done(self) -> bool:
        return not self._left and (self._next is None or self._next.done())

    def schedule(self) -> None:
        """Kill the next process in a while, unless a kill is due."""
        if self._next is not None:
            if not self._next.done():
                return
            self._next.result()
        if self._left:
            self._next = self._thread.submit(self._kill, self._left.pop(), self._draw.uniform(0, MAX_DELAY_S))

    def close(self) -> None:
        self._thread.shutdown()
        if self._next is not None:
            self._next.result()

    def _kill(self, part: str, delay_s: float) -> None:
        time.sleep(delay_s)  # the moment is drawn
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        while True:
            try:
                self._server.kill(part)
            except ProcessLookupError:  # its successor is not there yet
                if time.monotonic() > deadline:
                    raise
            else:
                self.killed.append(part)
                return
            time.sleep(POLL_S)


class KillClient:
    """Client with a model of its own."""

    def __init__(self, service: Any, server: RunningServer) -> None:
        self._client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        self._server = server
        self._saved = ""

    @property
    def model_id(self) -> str:
        return self._client.model_id

    def sampled_step(self, number: int) -> StepRecord:
        """Train on answers of the current weights, rewarded by the number of even tokens, while others are sampled."""
        sampler = self._client.save_weights_and_get_sampling_client().result()
        answers = _finish(_start(sampler, ANSWER_TOKENS), ANSWER_TOKENS)
        rewards = np.array([sum(token % 2 == 0 for token in each.tokens) for each in answers], np.float32)
        data = [_datum(*pair) for pair in zip(answers, rewards - rewards.mean(), strict=True)]
        beside = _start(sampler, LONG_ANSWER_TOKENS)
        record = self.step(number, data)
        _finish(beside, LONG_ANSWER_TOKENS)
        return record

    def step(self, number: int, data: Sequence[Any]) -> StepRecord:
        """Send a step's commands, all before the first result."""
        from tinker import types

        if number and number % LOAD_EVERY == 0:
            self._client.load_state_with_optimizer(self._saved).result()
        half = len(data) // 2
        halves = [
            self._client.forward_backward(list(part), "importance_sampling") for part in (data[:half], data[half:])
        ]
        step = self._client.optim_step(types.AdamParams(learning_rate=1e-3))
        save = self._client.save_state(f"step-{number}") if number % SAVE_EVERY == 0 else None
        record = StepRecord(data, tuple(each.result().metrics["loss:sum"] for each in halves), step.result().metrics)
        if save is not None:
            self._saved = save.result().path
        return record

    def checkpoint(self) -> bytes:
        """Return the adapter's file."""
        model_id, kind, name = self._client.save_state("end").result().path.removeprefix("tinker://").split("/")
        (folder,) = (self._server.folder / "tinker" / "checkpoints" / model_id / kind).glob(f"{name}@*")
        return (folder / "adapter_model.safetensors").read_bytes()


def train_under_kills(service: Any, server: RunningServer, kills: int, seed: int) -> KillRun:
    """Train until all kills are done and a step further, at least for `MIN_STEPS`."""
    client, killer = KillClient(service, server), Killer(server, kills, seed)
    records: list[StepRecord] = []
    try:
        is_last = False
        while not is_last or len(records) < MIN_STEPS:
            is_last = killer.is_done
            killer.schedule()
            records.append(client.sampled_step(len(records)))
    finally:
        killer.close()
    return KillRun(client.model_id, records, client.checkpoint(), tuple(killer.killed))


def repeat_undisturbed(service: Any, server: RunningServer, recorded: KillRun) -> KillRun:
    """Send the recorded commands for a new model."""
    client = KillClient(service, server)
    steps = [client.step(number, step.data) for number, step in enumerate(recorded.steps)]
    return KillRun(client.model_id, steps, client.checkpoint())


def _start(sampler: Any, num_tokens: int) -> Any:
    from tinker import types

    params = types.SamplingParams(max_tokens=num_tokens, stop=[])
    return sampler.sample(types.ModelInput.from_ints(list(PROMPT)), NUM_SAMPLES, params)


def _finish(future: Any, num_tokens: int) -> Sequence[Any]:
    """Return the answers; raises ValueError unless they are complete."""
    answers = future.result().sequences
    if (lengths := [len(each.tokens) for each in answers]) != [num_tokens] * NUM_SAMPLES:
        raise ValueError(f"answers of {lengths} tokens, not {NUM_SAMPLES} of {num_tokens}")
    return answers


def _datum(answer: Any, advantage: float) -> Any:
    from tinker import types

    tokens = [*PROMPT, *answer.tokens]
    num_context = len(PROMPT) - 1
    inputs: Any = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([0.0] * num_context + list(answer.logprobs), np.float32),
        "advantages": np.array([0.0] * num_context + [advantage] * len(answer.tokens), np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> int:
    import tinker

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    echo = Console().print
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-kills-") as temporary,
        running_server(Path(temporary) / "run") as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-kills") as service,
    ):
        began = time.monotonic()
        disturbed = train_under_kills(service, server, options.kills, options.seed)
        middle = time.monotonic()
        undisturbed = repeat_undisturbed(service, server, disturbed)
        ended = time.monotonic()
    counts = ", ".join(f"{disturbed.kills.count(part)} of {part}" for part in PARTS)
    echo(f"{len(disturbed.kills)} kills ({counts}) in {len(disturbed.steps)} steps: {middle - began:.0f} s")
    echo(f"the same commands undisturbed: {ended - middle:.0f} s")
    problems = disturbed.differences(undisturbed) + disturbed.miscounted() + undisturbed.miscounted()
    for problem in problems:
        echo(problem)
    echo("NOT equal" if problems else "losses, gradient norms, versions and the final checkpoint are equal to the bit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
