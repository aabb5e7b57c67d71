"""The learner as a process over a real Redis: what it leaves when it ends, is killed, stopped or replaced.

Episodes come from a scripted player that makes the same trajectories for the same group, so two runs can be compared to
the bit. No engine and no Ray.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from redis import Redis
from safetensors.torch import load_file

from deploy import preparation
from deploy.config import RunConfig
from deploy.loading import load_run
from services.buffer.client import Counters
from services.buffer.learner import RedisLearnerBuffer
from services.keys import RunKeys
from services.lease import LearnerLease
from services.telemetry import MetricRecord, RedisMetrics
from tests.integration.scripted_player import play_forever
from tests.waiting import wait_until_sync

ROOT = Path(__file__).parents[2]
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
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass
class Run:
    """A run without learner: its record, its buffer, its players."""

    config: RunConfig
    url: str
    redis: Redis
    learners: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    @property
    def keys(self) -> RunKeys:
        return RunKeys(self.config.exp_name)

    def start(self) -> subprocess.Popen[bytes]:
        """A learner process."""
        command = [sys.executable, "-m", "trainer.cli", self.config.exp_name, "--redis", self.url]
        with (self.config.output_dir / "stderr").open("wb") as errors:
            self.learners.append(subprocess.Popen(command, env=ENVIRONMENT, stderr=errors))
        return self.learners[-1]

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


@contextmanager
def a_run(url: str, folder: Path, name: str, overrides: Sequence[str] = ()) -> Iterator[Run]:
    config = load_run(QUICKSTART, [f"output_dir={folder / name}", f"exp_name={name}", *SMALL, *overrides])
    preparation.prepare_folder(config)
    with Redis.from_url(url) as redis:
        preparation.prepare_buffer(redis, config)
        record = {"config": config.model_dump_json(), "output_dir": str(config.output_dir), "created_at": "1.5"}
        redis.hset(RunKeys(name).record, mapping=cast(dict[Any, Any], record))
        run = Run(config, url, redis)
        with _players(run):
            try:
                yield run
            finally:
                for learner in run.learners:
                    if learner.poll() is None:
                        learner.kill()
                    learner.wait()
                redis.delete(*redis.scan_iter(f"{run.keys.prefix}*"))


@contextmanager
def _players(run: Run) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    folder = preparation.model_folder(run.config)
    thread = threading.Thread(target=lambda: loop.run_until_complete(play_forever(run.config, run.url, folder, stop)))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def undisturbed(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that nobody disturbs."""
    with a_run(redis_server, tmp_path_factory.mktemp("undisturbed"), "undisturbed") as run:
        assert run.start().wait(timeout=120) == 0
        yield run


def test_a_run_trains_every_step_and_says_so(undisturbed: Run) -> None:
    counters = undisturbed.counters()
    assert (counters.admitted, counters.trained, counters.in_flight) == (12, 12, 0)
    assert undisturbed.published() == 6
    steps = [r for r in undisturbed.records() if r.source == "learner" and r.step is not None]
    assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6]
    assert {"success", "reward", "staleness_max", "tokens_trained", "mismatch_kl", "actor/grad_norm"} <= set(
        steps[-1].values
    )
    found = {(r.labels["when"], r.labels["sampling"], r.step) for r in undisturbed.records() if r.source == "eval"}
    assert found == {
        ("before", "sampled", 0),
        ("before", "greedy", 0),
        ("during", "sampled", 2),
        ("during", "sampled", 4),
        ("after", "sampled", 6),
        ("after", "greedy", 6),
    }
    assert undisturbed.phase() == "finished"


def test_the_run_folder_holds_what_people_look_for(undisturbed: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = undisturbed.config.output_dir
    newest = folder / "checkpoints" / "step-000006"
    model = AutoModelForCausalLM.from_pretrained(newest)
    weights = undisturbed.weights(6)
    assert torch.equal(model.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(newest)("Down")["input_ids"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert list((folder / "tensorboard").iterdir())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(undisturbed.records())
    assert (folder / "evaluations" / "after-sampled-6.jsonl").is_file()
    assert "training" in (folder / "logs" / "learner.log").read_text()


@pytest.mark.parametrize("version", [0, 3])
def test_a_killed_learners_successor_ends_with_the_same_weights(
    redis_server: str, tmp_path: Path, undisturbed: Run, version: int
) -> None:
    with a_run(redis_server, tmp_path, f"killed{version}") as run:
        victim = run.start()
        wait_until_sync(lambda: run.published() >= version, timeout_s=60)
        victim.kill()
        victim.wait()
        assert run.start().wait(timeout=120) == 0
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (12, 12, 0)
        for name, tensor in undisturbed.weights(6).items():
            assert torch.equal(tensor, run.weights(6)[name]), name


def test_sigterm_leaves_a_checkpoint_and_a_later_learner_goes_on(
    redis_server: str, tmp_path: Path, undisturbed: Run
) -> None:
    with a_run(redis_server, tmp_path, "stopped", ["save_steps=100"]) as run:
        first = run.start()
        wait_until_sync(lambda: run.published() >= 2, timeout_s=60)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=20) == 0
        assert not run.redis.exists(run.keys.lease)
        state = json.loads(
            next((run.config.output_dir / "checkpoints").glob("step-00000[2-6]/learner.json")).read_text()
        )
        assert run.counters().trained == 2 * state["step"]
        assert run.start().wait(timeout=120) == 0
        assert run.counters().trained == 12
        for name, tensor in undisturbed.weights(6).items():
            assert torch.equal(tensor, run.weights(6)[name]), name


def test_sigterm_during_the_warm_start_ends_it(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "early", ["warm_start.steps=100000"]) as run:
        learner = run.start()
        wait_until_sync(lambda: run.phase().startswith("warming up 1"), timeout_s=60)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(timeout=20) == 0
        assert run.published() == -1


def test_a_learner_that_lost_its_lease_stops_with_its_own_code(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "fenced", ["max_steps=100000"]) as run:
        learner = run.start()
        wait_until_sync(lambda: run.published() >= 1, timeout_s=60)
        learner.send_signal(signal.SIGSTOP)
        with LearnerLease(run.redis, run.config.exp_name, "successor", 30.0) as lease:
            lease.acquire(wait_s=10.0)
            learner.send_signal(signal.SIGCONT)
            assert learner.wait(timeout=30) == 3
        assert "offbeat learner: run fenced: " in run.complaint()


def test_a_second_learner_is_told_that_the_run_is_held(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "held") as run, LearnerLease(run.redis, "held", "somebody", 60.0) as lease:
        lease.acquire()
        learner = run.start()
        assert learner.wait(timeout=60) == 1
        assert "another learner holds the run: somebody" in run.complaint()


def test_two_processes_learn_what_one_learns(redis_server: str, tmp_path: Path, undisturbed: Run) -> None:
    with a_run(
        redis_server, tmp_path, "two", ["actor_train.num_processes=2", "actor_train.strategy_args.zero_stage=2"]
    ) as run:
        assert run.start().wait(timeout=180) == 0
        assert run.counters().trained == 12
        for name, tensor in undisturbed.weights(6).items():
            if not name.endswith("k_proj.bias"):  # its gradient is rounding alone, which Adam blows up
                torch.testing.assert_close(tensor, run.weights(6)[name], rtol=0, atol=2e-2, msg=name)


def test_a_checkpoint_that_can_not_be_used_is_refused_with_one_line(redis_server: str, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with a_run(redis_server, tmp_path, "nowhere", [f"resume_from_checkpoint={nothing}"]) as run:
        assert run.start().wait(timeout=60) == 2
        assert "offbeat learner: run nowhere: not a whole checkpoint" in run.complaint()


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({}, b"there is no run"),
        ({"config": "{}"}, b"custom_envs"),
    ],
)
def test_a_run_that_can_not_be_read_is_refused_with_one_line(
    redis_server: str, record: dict[str, str], complaint: bytes
) -> None:
    with Redis.from_url(redis_server) as redis:
        redis.delete(RunKeys("broken").record)
        if record:
            redis.hset(RunKeys("broken").record, mapping=cast(dict[Any, Any], record))
        command = [sys.executable, "-m", "trainer.cli", "broken", "--redis", redis_server]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith(b"offbeat learner: ")]
    assert len(lines) == 1
    assert complaint in lines[0]
