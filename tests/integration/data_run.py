"""A run of a data pipeline over a real Redis: the real env worker reads its rows; tests bring the learner. No Ray."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offbeat.deploy import run_setup
from offbeat.deploy.config.loader import load_run
from offbeat.envs.frozen_lake.rows import conversations, pairs, unpaired, write_rows
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.generation.client import NoGeneration
from offbeat.services.redis.connection import connect_async
from offbeat.services.rollout.data.source import open_data
from offbeat.services.rollout.worker import EnvWorker
from offbeat.services.telemetry import AsyncRedisMetrics
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.learner_run import Run, killed_at_exit, prepared_run
from tests.paths import CONFIGS

SMALL = (
    "data.num_train_epochs=null",
    "max_steps=6",
    "save_steps=2",
    "eval_steps=2",
    "rollout_batch_size=8",
    "tiny.num_hidden_layers=1",
    "buffer.learner_timeout_s=2",
    "buffer.worker_timeout_s=2",
    "rollout.max_env_num_per_worker=4",
)


@contextmanager
def a_data_run(
    url: str, folder: Path, name: str, pipeline: str, overrides: Sequence[str] = (), *, works: bool = True
) -> Iterator[Run]:
    """pipeline: or `kto`, which is a loss of `dpo`. works: start a worker."""
    make = {"dpo": pairs, "reward_model": pairs, "kto": unpaired}.get(pipeline, conversations)
    rows, held_out = folder / f"{pipeline}.jsonl", folder / f"{pipeline}_val.jsonl"
    write_rows(rows, make(20))
    write_rows(held_out, make(5, seed=1))
    settings = [f"output_dir={folder / name}", f"exp_name={name}", *SMALL]
    settings += [f"data.dataset_name={rows}", f"data.val_dataset_name={held_out}"]
    if pipeline == "distill":
        settings.append(f"teacher.lake.model_args.model_name_or_path={write_teacher(folder / 'teacher', rows)}")
    if pipeline == "kto":
        settings.append("dpo.loss_type=kto")
    settings += overrides
    config = "dpo" if pipeline == "kto" else pipeline
    with (
        prepared_run(url, load_run(CONFIGS / f"{config}.yaml", settings)) as run,
        killed_at_exit(run.learners),
    ):
        if not works:
            yield run
            return
        with a_worker(run, "worker"):
            yield run


def write_teacher(folder: Path, rows: Path) -> Path:
    """A tiny policy of random weights with the rows' words."""
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=2), words_of(rows))
    load_policy(folder, ModelArgs(), seed=7).model.save_pretrained(folder)
    return folder


def words_of(rows: Path) -> list[str]:
    messages = (each for line in rows.read_text().splitlines() for each in json.loads(line)["messages"])
    return list(dict.fromkeys(word for message in messages for word in message["content"].split()))


@contextmanager
def a_worker(run: Run, worker_id: str) -> Iterator[EnvWorker]:
    """A worker on a thread; it returns its rows at the end."""
    loop, workers, started = asyncio.new_event_loop(), list[EnvWorker](), threading.Event()

    async def work() -> None:
        settings = run_setup.worker_settings(run.config, run.url)
        redis = connect_async(run.url, run_id=run.config.exp_name)
        worker = EnvWorker(
            settings,
            worker_id,
            buffer=AsyncRolloutBuffer(redis, run.config.exp_name),
            generation=NoGeneration(),
            metrics=AsyncRedisMetrics(redis, run.config.exp_name),
            chat=load_chat_format(settings.model_folder),
            data=open_data(settings),
        )
        workers.append(worker)
        started.set()
        await worker.run()
        await redis.aclose()

    thread = threading.Thread(target=lambda: loop.run_until_complete(work()))
    thread.start()
    started.wait(timeout=60)
    try:
        yield workers[0]
    finally:
        loop.call_soon_threadsafe(workers[0].stop)
        thread.join()
        loop.close()
