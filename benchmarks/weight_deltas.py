"""Delta publishing against whole versions, on weights of real training steps.

Invariant: both ways yield equal bytes; receivers of deltas hold the base.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.environment import TAG, BenchEnvironment, manager
from offbeat.benchmarks.harness.learner import real_trainers
from offbeat.benchmarks.harness.result import Spread, show
from offbeat.benchmarks.harness.rollout_process import PolicySpec, RolloutProcess
from offbeat.deploy.config.run import RunConfig
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Group, Manifest
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import Stored, Transport
from offbeat.services.weights.transports.factory import make_transport
from offbeat.trainer.data.step_batch import StepBatch

GROUPS, GROUP_SIZE = 8, 8
"""Per batch."""
WARM_START_STEPS = 60
TAKE_S = 30.0


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    learning_rates: tuple[float, ...] = (1e-6, 1e-5, 8e-4)
    """From large models' to the quickstart's."""
    steps: int = 9
    anchor_every: int = 4


@dataclass(slots=True)
class _Way:
    learner: Transport
    replica: Transport
    stored: list[Stored]
    stage_s: list[float]
    fetch_s: list[float]


def measure(base: BenchEnvironment, options: DeltaOptions, echo: Callable[[str], None]) -> list[dict[str, Any]]:
    lake = CustomEnv(env_type="frozen_lake", max_steps=12, max_tokens_per_step=4, execution="inline")
    changes = {"custom_envs": {TAG: lake}, "train_env_manager": manager(GROUPS, GROUP_SIZE), "max_steps": options.steps}
    config = base.run_config("bench-deltas", old_logprobs="recompute", **changes)
    assert config.warm_start is not None
    warm_start = config.warm_start.model_copy(update={"steps": WARM_START_STEPS})
    config = config.model_copy(update={"warm_start": warm_start, "max_staleness": 1e6})
    echo("playing episodes")
    batches = _batches(base, config)
    with real_trainers(base, config, echo) as trainers:
        return [
            _row(base, options, trainers(_with_learning_rate(config, rate)), rate, batches, echo)
            for rate in options.learning_rates
        ]


def _with_learning_rate(config: RunConfig, rate: float) -> RunConfig:
    args = config.actor_train.training_args.model_copy(
        update={"learning_rate": rate, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    )
    return config.model_copy(update={"actor_train": config.actor_train.model_copy(update={"training_args": args})})


def _batches(base: BenchEnvironment, config: RunConfig) -> list[list[Group]]:
    epoch = base.prepare(config)
    keys = RunKeys(config.exp_name)
    base.redis.hset(keys.progress, mapping={"version": 0, "step": 0})
    buffer = RedisLearnerBuffer(base.redis, config.exp_name, epoch)
    with RolloutProcess(
        PolicySpec("client"), config.output_dir / "policy", sequence_length=config.sequence_length
    ) as rollouts:
        rollouts.start_run(base.worker_settings(config))
        groups = [_take_group(buffer) for _ in range(config.max_steps * GROUPS)]
        rollouts.stop()
    return [groups[i : i + GROUPS] for i in range(0, len(groups), GROUPS)]


def _take_group(buffer: RedisLearnerBuffer) -> Group:
    group = buffer.take(TAKE_S)
    if group is None:
        raise TimeoutError(f"no group was played within {TAKE_S:g} s")
    return group


def _row(
    base: BenchEnvironment,
    o: DeltaOptions,
    trainer: Any,
    rate: float,
    batches: Sequence[Sequence[Group]],
    echo: Callable[[str], None],
) -> dict[str, Any]:
    full, delta = (_way(base, rate, every) for every in (1, o.anchor_every))
    for step, groups in enumerate(batches):
        echo(f"learning rate {rate:g}, step {step + 1}/{len(batches)}")
        trainer.train(StepBatch(step, tuple(groups), tuple(groups)))
        contents = [_transfer(way, step, dict(trainer.tensors())) for way in (full, delta)]
        if contents[0] != contents[1]:
            raise RuntimeError(f"version {step} is not the same both ways")
    by_difference = [i for i, stored in enumerate(delta.stored) if stored.anchor is not None]
    sizes = [delta.stored[i].num_bytes for i in by_difference]
    return {
        "learning_rate": rate,
        "whole_bytes": full.stored[0].num_bytes,
        "difference_bytes": Spread.of(sizes) if sizes else None,
        "differences": len(sizes),
        "versions": len(delta.stored),
        "bytes_of_whole": sum(s.num_bytes for s in delta.stored) / sum(s.num_bytes for s in full.stored),
        "whole_stage_s": Spread.of(full.stage_s[1:]),
        "whole_fetch_s": Spread.of(full.fetch_s[1:]),
        "difference_stage_s": Spread.of(delta.stage_s[i] for i in by_difference) if sizes else None,
        "difference_fetch_s": Spread.of(delta.fetch_s[i] for i in by_difference) if sizes else None,
    }


def _way(base: BenchEnvironment, rate: float, anchor_every: int) -> _Way:
    url = base.folder / f"versions-{rate:g}-{anchor_every}"
    config = WeightsConfig(transport="fs", url=str(url), dtype="bfloat16", anchor_every=anchor_every)
    ends = [make_transport(config, "bench-deltas", Path()) for _ in range(2)]
    return _Way(*ends, stored=[], stage_s=[], fetch_s=[])


def _transfer(way: _Way, version: int, tensors: dict[str, Any]) -> bytes:
    began = time.monotonic()
    stored = way.learner.stage(version, 1, way.learner.copies(tensors.items()))
    way.stage_s.append(time.monotonic() - began)
    way.stored.append(stored)
    manifest = Manifest(
        "bench-deltas",
        version,
        version,
        1,
        "fs",
        stored.location,
        stored.digest,
        stored.num_bytes,
        (),
        0.0,
        stored.anchor,
    )
    began = time.monotonic()
    with way.replica.fetch(manifest) as path:
        way.fetch_s.append(time.monotonic() - began)
        return path.read_bytes()


def show_deltas(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("learning rate", "whole KB", "difference KB", "differences", "bytes of whole", "stage ms", "whole")
    show(
        "Differences to an anchor, bfloat16",
        (*columns, "fetch ms", "whole"),
        [
            [
                f"{r['learning_rate']:g}",
                r["whole_bytes"] / 1e3,
                r["difference_bytes"].median / 1e3 if r["difference_bytes"] else None,
                f"{r['differences']} of {r['versions']}",
                r["bytes_of_whole"],
                *_times(r, "stage_s"),
                *_times(r, "fetch_s"),
            ]
            for r in rows
        ],
    )


def _times(row: dict[str, Any], name: str) -> list[float | None]:
    both = (row[f"difference_{name}"], row[f"whole_{name}"])
    return [1000 * spread.median if spread else None for spread in both]
