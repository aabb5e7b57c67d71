"""A run without a learner over a real Redis: its record, its buffer, its players; tests bring the learner.

Episodes come from a scripted player that makes the same trajectories for the same group, so two runs can be compared to
the bit. No engine and no Ray.
"""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from redis import Redis
from safetensors.torch import load_file

from offbeat.deploy import run_setup
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.services.buffer.api import Counters
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import MetricRecord, RedisMetrics
from tests.forked import ForkedProcess
from tests.integration.scripted_player import play_forever
from tests.paths import ROOT

QUICKSTART = ROOT / "deploy" / "configs" / "quickstart.yaml"
SMALL = (
    "max_steps=6",
    "save_steps=2",
    "eval_steps=2",
    "rollout_batch_size=8",
    "train_env_manager.group_size=4",
    "train_env_manager.num_env_groups=2",
    "val_batch_size=2",
    "final_val_batch_size=4",
    "tiny.num_hidden_layers=1",
    "warm_start.steps=4",
    "zero_variance=train",
    "buffer.learner_timeout_s=2",
    "weights.transport=fs",
    "custom_envs.FrozenLake.max_steps=4",
)
IMPATIENT = (
    "from offbeat.trainer import cli; from offbeat.trainer.process import outage;"
    "outage.RETRY_TIMEOUT_S = {}; cli.main()"
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass
class Run:
    """A run without learner: its record, its buffer, its players."""

    config: RunConfig
    url: str
    redis: Redis
    learners: list[ForkedProcess] = field(default_factory=list[ForkedProcess])

    @property
    def keys(self) -> RunKeys:
        return RunKeys(self.config.exp_name)

    def start(self, *, patience_s: float | None = None) -> ForkedProcess:
        """A learner process. patience_s: after which it calls a Redis that can't be used an outage."""
        program = ["-m", "offbeat.trainer.cli"] if patience_s is None else ["-c", IMPATIENT.format(patience_s)]
        command = [*program, self.config.exp_name, "--redis", self.url]
        with (self.config.output_dir / "stderr").open("wb") as errors:
            self.learners.append(ForkedProcess(command, env=ENVIRONMENT, stderr=errors))
        return self.learners[-1]

    def attach(self, *options: str) -> ForkedProcess:
        """A learner that a person attaches; what it says goes to `said`."""
        command = ["-m", "offbeat.deploy.cli.app", "learner", "attach", self.config.exp_name, *options]
        environment = {**ENVIRONMENT, "OFFBEAT_REDIS": self.url}
        with (self.config.output_dir / f"said-{len(self.learners)}").open("wb") as out:
            learner = ForkedProcess(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        self.learners.append(learner)
        return learner

    def said(self, learner: ForkedProcess) -> str:
        """Everything that an attached learner has said so far."""
        return (self.config.output_dir / f"said-{self.learners.index(learner)}").read_text()

    def complaint(self) -> str:
        return (self.config.output_dir / "stderr").read_text()

    def published(self) -> int:
        raw = cast(bytes | None, self.redis.hget(self.keys.progress, "version"))
        return -1 if raw is None else int(raw)

    def phase(self) -> str:
        return (cast(bytes | None, self.redis.hget(self.keys.record, "learner_phase")) or b"").decode()

    def counters(self) -> Counters:
        return RedisLearnerBuffer(self.redis, self.config.exp_name, 0).counters()

    def records(self) -> list[MetricRecord]:
        return [record for _, record in RedisMetrics(self.redis, self.config.exp_name).read(count=100_000)]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.config.output_dir / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def rank_of(learner: int, rank: int) -> psutil.Process:
    """Return the process of a learner's rank; other children may end meanwhile."""
    (found,) = [child for child in psutil.Process(learner).children(recursive=True) if _has_rank(child, rank)]
    return found


def _has_rank(process: psutil.Process, rank: int) -> bool:
    try:
        return process.environ().get("RANK") == str(rank)
    except psutil.Error:
        return False


@contextmanager
def a_run(
    url: str, folder: Path, name: str, overrides: Sequence[str] = (), *, num_processes: int | None = None
) -> Iterator[Run]:
    """num_processes: of the learner, more than there are CPUs."""
    config = load_run(QUICKSTART, [f"output_dir={folder / name}", f"exp_name={name}", *SMALL, *overrides])
    if num_processes is not None:
        train = config.actor_train.model_copy(update={"num_processes": num_processes})
        config = config.model_copy(update={"actor_train": train})
    with prepared_run(url, config) as run, _players(run), killed_at_exit(run.learners):
        yield run


@contextmanager
def prepared_run(url: str, config: RunConfig) -> Iterator[Run]:
    name = config.exp_name
    run_setup.prepare_folder(config)
    with Redis.from_url(url) as redis:
        run_setup.prepare_buffer(redis, config)
        record = {"config": config.model_dump_json(), "output_dir": str(config.output_dir), "created_at": "1.5"}
        redis.hset(RunKeys(name).record, mapping=cast(dict[Any, Any], record))
        run = Run(config, url, redis)
        try:
            yield run
        finally:  # after the players, for whom a run without data is one that Redis has lost
            redis.delete(*redis.scan_iter(f"{run.keys.prefix}*"))


@contextmanager
def killed_at_exit(learners: list[ForkedProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for learner in learners:
            if learner.poll() is None:
                learner.kill()
            learner.wait()


@contextmanager
def _players(run: Run) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    folder = run_setup.model_folder(run.config)
    thread = threading.Thread(target=lambda: loop.run_until_complete(play_forever(run.config, run.url, folder, stop)))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
