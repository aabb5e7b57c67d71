"""Jobs for TRL's venv, as JSON; standard library only."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Play:
    """Rules as in `offbeat.services.rollout`."""

    env_type: str
    env_config: dict[str, Any]
    system_prompt: str
    agent_template: str
    """User message with `{observation}`, `{step}` and `{actions_left}`."""
    max_turns: int
    max_new_tokens: int
    """Per answer."""
    sequence_length: int
    """Longest episode, tokens."""
    env_threads: int
    """0: step on the main thread."""
    together: bool = False
    """True: a turn waits for all running episodes. False: ready ones are batched."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    policy: str
    output: str
    """Folder for `steps.jsonl` and `snapshots/`."""
    play: Play
    seed: int
    task_seeds: list[int]
    """Env seed per group, in order."""
    steps: int
    groups_per_step: int
    group_size: int
    micro_batch: int
    """Sequences per pass."""
    learning_rate: float
    warmup_steps: int
    lr_scheduler_type: str
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    pg_clip: float
    scale_rewards: str
    """`none` or `group`: divide by the group's standard deviation."""
    entropy_coef: float
    dtype: str
    threads: int
    snapshot_every: int
    """Steps; 0: none. Its time is excluded."""
    max_seconds: float
    """Training ends at the next step."""


@dataclass(frozen=True, slots=True)
class EvaluateJob:
    """Evaluation on held-out tasks, sampled at temperature 1."""

    policy: str
    """Folder with the tokenizer."""
    folders: list[str]
    play: Play
    task_seeds: list[int]
    seed: int
    batch: int
    dtype: str
    threads: int
    output: str
    """JSON list in the order of `folders`."""


def write(path: Path, job: TrainJob | EvaluateJob) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def read(path: Path) -> TrainJob | EvaluateJob:
    values = json.loads(path.read_text(encoding="utf-8"))
    values["play"] = Play(**values["play"])
    kind = TrainJob if "steps" in values else EvaluateJob
    return kind(**{field.name: values[field.name] for field in fields(kind)})
