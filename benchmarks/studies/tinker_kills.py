"""Reinforcement learning by Tinker's API while the server's processes are killed, against the same commands undisturbed.

python -m offbeat.benchmarks.studies.tinker_kills --kills 20 --seed 1
python -m offbeat.benchmarks.studies.tinker_kills --cookbook tinker.engine=vllm

Invariant: results of commands, metrics and checkpoints are equal to the bit, and a command counts once.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from offbeat.benchmarks.harness.pretrained import write_llama
from offbeat.benchmarks.tinker.cookbook import last_checkpoint, run_recipe, write_sums
from offbeat.benchmarks.tinker.recording import Commands, RecordedCommand, recording
from offbeat.benchmarks.tinker.replay import CommandReplay
from offbeat.benchmarks.tinker.server import ENGINE, HTTP, LEARNER, REDIS, RunningServer, running_server

KEY = "tml-kills"
PARTS = LEARNER, HTTP, REDIS
STEP = "optim_step"
PROMPT = (4, 9, 5)
NUM_SAMPLES, ANSWER_TOKENS = 4, 16
LONG_ANSWER_TOKENS = 64
"""Of a sample that runs beside a step's commands."""
SAVE_EVERY, LOAD_EVERY = 4, 10
MAX_DELAY_S = 1.0
"""Upper bound of the drawn time from an optimizer step's command to a kill."""
MIN_STEPS = 12
"""Includes a load."""
RL_STEPS_PER_KILL = 3
"""Of the recipe, whose length is fixed before."""
RECIPE_TIMEOUT_S = 3600.0
POLL_S, RESTART_TIMEOUT_S = 0.05, 120.0


class Killer:
    """Kills one process at a time, at a drawn moment, in a drawn order with each part equally often."""

    def __init__(
        self, server: RunningServer, kills: int, seed: int, parts: Sequence[str] = PARTS, every: int = 1
    ) -> None:
        """every: optimizer steps from a kill to the next, at least."""
        self._server = server
        self._every = every
        self._wait = 0
        self._draw = random.Random(seed)
        self._left = [parts[i % len(parts)] for i in range(kills)]
        self._draw.shuffle(self._left)
        self._thread = ThreadPoolExecutor(1, "killer")
        self._next: Future[None] | None = None
        self.killed: list[str] = []

    @property
    def is_done(self) -> bool:
        return not self._left and (self._next is None or self._next.done())

    def schedule(self, command: RecordedCommand) -> None:
        """Kill the next process in a while after an optimizer step's command, unless a kill is due or has failed."""
        if command.route != STEP:
            return
        self._wait -= 1
        if self._wait < 0 and self._left and (self._next is None or _has_succeeded(self._next)):
            self._wait = self._every - 1
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


Workload = Callable[[str, Killer], None]
"""Client that trains through the given address until all kills are done."""


@dataclass(frozen=True, slots=True)
class Recording:
    """kills: module or program of each killed process."""

    commands: Commands
    kills: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        return sum(command.route == STEP for command in self.commands.values())


def record_under_kills(server: RunningServer, workload: Workload, killer: Killer) -> Recording:
    with recording(server.url, killer.schedule) as recorder:
        try:
            workload(recorder.url, killer)
        finally:
            killer.close()
    return Recording(recorder.commands, tuple(killer.killed))


def find_differences(server: RunningServer, recorded: Recording) -> list[str]:
    """Return what differs after the same commands undisturbed, for new models."""
    replay = CommandReplay(server.url, KEY, server.folder, recorded.commands)
    return replay.recorded().differences(replay.repeat())


def train_with_cookbook(model: Path, folder: Path, kills: int) -> Workload:
    """Return tinker-cookbook's supervised recipe on sums, and from its checkpoint `rl.train` on arithmetic.

    model: folder of the base model; folder: for logs.
    """
    data, settings = folder / "sums.jsonl", ("lora_rank=8", "save_every=4", "eval_every=0")

    def train(url: str, _: Killer) -> None:
        write_sums(data)
        run_recipe(
            *("chat_sl.train", url, KEY, model, folder / "supervised", *settings, f"dataset={data}"),
            *("batch_size=32", "num_epochs=3", "learning_rate=1e-2"),
            timeout_s=RECIPE_TIMEOUT_S,
        )
        run_recipe(
            *("math_rl.train", url, KEY, model, folder / "rl", *settings, "env=arithmetic", "loss_fn=ppo"),
            *("groups_per_batch=4", "group_size=8", "max_tokens=12", "learning_rate=1e-3"),
            f"load_checkpoint_path={last_checkpoint(folder / 'supervised')}",
            f"max_steps={RL_STEPS_PER_KILL * kills}",
            timeout_s=RECIPE_TIMEOUT_S,
        )

    return train


def train_with_sdk(url: str, killer: Killer) -> None:
    """Train on answers of the current weights, rewarded by the number of even tokens, a step further than all kills."""
    import tinker

    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        number, saved, is_last = 0, "", False
        while not is_last or number < MIN_STEPS:
            is_last = killer.is_done
            if number and number % LOAD_EVERY == 0:
                client.load_state_with_optimizer(saved).result()
            saved = _train_step(client, number) or saved
            number += 1
        client.save_state("end").result()


def _train_step(client: Any, number: int) -> str:
    """Send a step's commands, all before the first result, while others are sampled; return the checkpoint, if any."""
    from tinker import types

    sampler = client.save_weights_and_get_sampling_client().result()
    answers = _finish(_start(sampler, ANSWER_TOKENS), ANSWER_TOKENS)
    rewards = np.array([sum(token % 2 == 0 for token in each.tokens) for each in answers], np.float32)
    data = [_datum(*pair) for pair in zip(answers, rewards - rewards.mean(), strict=True)]
    beside = _start(sampler, LONG_ANSWER_TOKENS)
    half = len(data) // 2
    gradients = [client.forward_backward(part, "importance_sampling") for part in (data[:half], data[half:])]
    step = client.optim_step(types.AdamParams(learning_rate=1e-3))
    save = client.save_state(f"step-{number}") if number % SAVE_EVERY == 0 else None
    for each in (*gradients, step):
        each.result()
    _finish(beside, LONG_ANSWER_TOKENS)
    return save.result().path if save is not None else ""


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


def _has_succeeded(future: Future[None]) -> bool:
    return future.done() and future.exception() is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cookbook", action="store_true", help="rl.train of tinker-cookbook, on a random Llama")
    parser.add_argument("overrides", nargs="*", help="of the server's configuration, such as tinker.engine=vllm")
    options = parser.parse_args()
    echo = Console(markup=False, emoji=False, highlight=False, soft_wrap=True).print
    parts = (*PARTS, ENGINE) if "tinker.engine=vllm" in options.overrides else PARTS
    with tempfile.TemporaryDirectory(prefix="offbeat-kills-") as temporary, ExitStack() as stack:
        folder, workload, model = Path(temporary), train_with_sdk, ()
        if options.cookbook:
            write_llama(folder / "llama")
            workload = train_with_cookbook(folder / "llama", folder, options.kills)
            model = f"pretrain={folder / 'llama'}", "warm_start=null"
        server = stack.enter_context(running_server(folder / "run", *model, *options.overrides))
        began = time.monotonic()
        killer = Killer(server, options.kills, options.seed, parts, every=RL_STEPS_PER_KILL if options.cookbook else 1)
        recorded = record_under_kills(server, workload, killer)
        middle = time.monotonic()
        counts = ", ".join(f"{recorded.kills.count(part)} of {part}" for part in parts)
        echo(
            f"{len(recorded.kills)} kills ({counts}) in {recorded.num_steps} steps, {len(recorded.commands)} commands: "
            f"{middle - began:.0f} s"
        )
        differences = find_differences(server, recorded)
        echo(f"the same commands undisturbed: {time.monotonic() - middle:.0f} s")
    for difference in differences:
        echo(difference)
    echo("NOT equal" if differences else "results, metrics and checkpoints are equal to the bit")
    return 1 if differences or len(recorded.kills) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
