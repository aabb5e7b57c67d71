"""Learner in the benchmark's process."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.benchmarks.harness.environment import BenchEnvironment
from offbeat.deploy.config.run import RunConfig
from offbeat.services.buffer.config import Order
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.scores import RedisGroupScores
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.learner.components import build_components
from offbeat.trainer.learner.evaluations import RedisEvaluationLog
from offbeat.trainer.learner.loop import Learner
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from offbeat.trainer.training.score_keys import selection_digest
from offbeat.trainer.training.trainer import Trainer
from offbeat.trainer.warm_start.train import Progress

START = "start"


class TimedTrainer:
    """`Trainer` that sleeps `train_s` per batch."""

    kl_coef = 0.0
    vocab_size = 1 << 24
    last_step = None

    def __init__(self, train_s: float) -> None:
        self._train_s = train_s
        self._weights = torch.zeros(1024)

    def begin(self, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        del progress, should_stop
        return True

    def load(self, folder: Path, kl_coef: float) -> None:
        raise NotImplementedError("a benchmark starts from the beginning")

    def set_learning_rate(self, learning_rate: float) -> None: ...

    def train(self, batch: StepBatch) -> dict[str, Partial]:
        time.sleep(self._train_s)
        self._weights.fill_(batch.step)
        return {"actor/grad_norm": Partial("last", 1.0)}  # without one the learner warns that nothing is trained

    def tensors(self, *, with_base: bool = True) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        yield "weight", self._weights

    def save(self, folder: Path) -> None:
        (folder / "nothing").touch()


class Records:
    def __init__(self, on_step: Callable[[int], None]) -> None:
        self._on_step = on_step
        self.steps: list[MetricRecord] = []
        self.evaluations: list[MetricRecord] = []

    def append(self, record: MetricRecord, once: str = "") -> None:
        del once
        if record.source == "eval":
            self.evaluations.append(record)
        if record.source == "learner" and record.step is not None:
            self.steps.append(record)
            self._on_step(record.step)

    def show(self, **_: str) -> None: ...


class BenchLearner:
    """Call `publish_start`, then `run`."""

    def __init__(
        self,
        bench_env: BenchEnvironment,
        config: RunConfig,
        epoch: int,
        trainer: Any,
        on_step: Callable[[int], None],
        *,
        check: Callable[[], None],
        evaluates: bool = False,
        order: Order = "completion",
        ends_at: float = math.inf,
    ) -> None:
        """trainer: started. check: raises if rollouts failed. ends_at: monotonic."""
        read = learner_config(config, evaluates=evaluates)
        run = LearnerRun(config.exp_name, config.exp_name, config.output_dir, read)
        self._trainer: Trainer = trainer
        self._publisher = RedisWeightPublisher(
            bench_env.redis, config.exp_name, config.weights, epoch, config.output_dir, read.adapter_settings
        )
        self.records = Records(on_step)

        def should_stop() -> bool:
            check()
            return time.monotonic() > ends_at

        buffer = RedisLearnerBuffer(bench_env.redis, config.exp_name, epoch, order=order)
        components = build_components(
            run,
            trainer=trainer,
            vocab_size=trainer.vocab_size,
            publisher=self._publisher,
            buffer=buffer,
            checkpoints=CheckpointStore(run.checkpoints, 1, epoch),
            uploads=None,
            sink=self.records,
            log=RedisEvaluationLog(bench_env.redis, config.exp_name),
            reporter=LearnerReporter(self.records, self.records),
            scores=RedisGroupScores(bench_env.redis, config.exp_name, selection_digest(config)),
            turns=None,
            should_stop=should_stop,
        )
        self._learner = Learner(run, components)

    def publish_start(self) -> None:
        self._publisher.publish(0, 0, self._trainer.tensors())

    def run(self) -> list[MetricRecord]:
        try:
            self._learner.run()
        finally:
            self.close()
        return self.records.steps

    def close(self) -> None:
        """Wait for pending publishes."""
        self._publisher.close()


def learner_config(config: RunConfig, *, evaluates: bool = False) -> LearnerRunConfig:
    return config if evaluates else config.model_copy(update={"eval_steps": 0, "final_val_batch_size": 0})


@contextmanager
def real_trainers(
    bench_env: BenchEnvironment, config: RunConfig, show: Callable[[str], None]
) -> Iterator[Callable[[RunConfig], Any]]:
    torch.set_num_threads(config.actor_train.num_threads)
    torch.manual_seed(config.seed)
    ranks = ranks_of_environment("cpu")
    with process_group(ranks):
        folder = bench_env.folder / START
        _warm_start(config, ranks, folder, show)
        yield lambda of: _trainer(of.model_copy(update={"pretrain": str(folder), "warm_start": None}), ranks)


def _warm_start(config: RunConfig, ranks: Ranks, folder: Path, show: Callable[[str], None]) -> None:
    folder.mkdir()
    trainer = _trainer(config, ranks, begin=False)
    trainer.begin(lambda done, total: show(f"warm start {done}/{total}"), lambda: False)
    trainer.save(folder)


def _trainer(config: RunConfig, ranks: Ranks, *, begin: bool = True) -> PolicyTrainer:
    run = LearnerRun(config.exp_name, config.exp_name, config.output_dir, learner_config(config))
    trainer = PolicyTrainer(run, ranks)
    if begin:
        trainer.begin(lambda *_: None, lambda: False)
    return trainer
