"""Reproduces training from recorded batches: from a checkpoint, through its batches, to weights that must be equal.

Invariant: only the run's folder is read, and nothing in it changes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.services.errors import ControlError
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.batch_log import BatchLog, RecordedBatch
from offbeat.trainer.training.checkpoint import (
    PREFIX,
    Checkpoint,
    CheckpointError,
    read_checkpoint,
)
from offbeat.trainer.training.policy_trainer import PolicyTrainer


@dataclass(frozen=True, slots=True)
class SampleView:
    """One trajectory as the step saw it before its first optimizer step."""

    group: int
    index: int
    reward: float
    turns: int
    tokens: int
    """Sampled and trained on."""
    versions: tuple[int, int]
    """Oldest and newest that sampled one of them."""
    staleness: int
    ratio_mean: float
    """exp(policy's logprob - recorded logprob), over its tokens."""
    ratio_max: float
    advantage_mean: float
    advantage_min: float
    advantage_max: float


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """Weights made again, held against a checkpoint's."""

    step: int
    equal: bool
    """Bit for bit."""
    tensors: int
    largest_difference: float


@dataclass(frozen=True, slots=True)
class ReproductionResult:
    """Result of a reproduction."""

    start: int
    """Step of the checkpoint it began from."""
    steps: tuple[int, ...]
    """Trained again."""
    compared: tuple[WeightComparison, ...]
    samples: tuple[SampleView, ...] = ()
    """Samples of the requested step."""


@dataclass(frozen=True, slots=True)
class ReproductionPlan:
    """Checkpoint to start from, steps to repeat, and checkpoints to compare with."""

    start: Checkpoint
    steps: tuple[int, ...]
    checkpoints: dict[int, Path]


def find_plan(run: LearnerRun, step: int | None) -> ReproductionPlan:
    """Return the plan to reach step `step`, or the longest one between two checkpoints.

    Raises:
        ControlError: something is missing in the run's folder; the message says what.
    """
    whole = _whole(run.checkpoints)
    recorded = BatchLog(run.output_dir).steps()
    if not recorded:
        raise ControlError(
            f"{run.output_dir} holds no recorded batches: set record_batches to the steps to keep, and train"
        )
    goals = [step] if step is not None else sorted(whole, reverse=True)
    for goal in goals:
        for start in sorted(whole) if step is None else sorted(whole, reverse=True):
            needed = tuple(range(start + 1, goal + 1))
            if needed and set(needed) <= set(recorded):
                paths = {each: checkpoint.path for each, checkpoint in whole.items() if start < each <= goal}
                return ReproductionPlan(whole[start], needed, paths)
    have = f"recorded are steps {recorded[0]} to {recorded[-1]}, whole checkpoints are of steps {sorted(whole)}"
    if step is None:
        raise ControlError(f"no two checkpoints with every batch between them: {have}")
    raise ControlError(f"no way to step {step} from a checkpoint before it: {have}")


def reproduce(
    run: LearnerRun, route: ReproductionPlan, ranks: Ranks, *, shown: int | None, say: Callable[[str], None]
) -> ReproductionResult:
    """Run the plan inside the process group of `ranks`. shown: step whose samples are returned.

    Raises:
        ControlError: the checkpoint was written by several processes.
        CodecError: a recorded batch can't be read.
    """
    start, store = route.start, BatchLog(run.output_dir)
    if start.state.num_processes != 1:
        raise ControlError(
            f"{start.path} was written by {start.state.num_processes} processes: only what one process trained is trained "
            "again bit for bit"
        )
    train = run.config.actor_train
    torch.set_num_threads(train.num_threads)
    torch.manual_seed(run.config.seed)
    compared: list[WeightComparison] = []
    samples: Sequence[SampleView] = ()
    trainer = PolicyTrainer(run, ranks)
    trainer.load(start.path, start.state.kl_coef)
    say(f"from {start.path}")
    for step in route.steps:
        batch = store.read(step)
        trainer.set_learning_rate(batch.learning_rate)
        if step == shown:
            samples = preview(trainer, batch)
        trainer.train(batch.groups, step - 1, batch.silent, batch.weights)
        if step in route.checkpoints:
            compared.append(_compare(step, trainer, route.checkpoints[step]))
        say(f"step {step}: {len(batch.groups)} groups{_verdict(compared, step)}")
    return ReproductionResult(start.state.step, route.steps, tuple(compared), tuple(samples))


def preview(trainer: PolicyTrainer, batch: RecordedBatch) -> list[SampleView]:
    """Return each trajectory of a batch with ratios and advantages under the current weights."""
    seen = trainer.preview(batch.groups, batch.step - 1, batch.silent)
    if seen is None:
        return []
    packed, targets = seen.batch, seen.targets
    ratios = (seen.logprobs - packed.behavior_logprobs).exp()
    views: list[SampleView] = []
    members = [(group, trajectory) for group in seen.groups for trajectory in group.trajectories]
    for place, (group, trajectory) in enumerate(members):
        its = packed.trajectory == place
        if not bool(its.any()):
            continue
        versions, advantages, ratio = packed.versions[its], targets.advantages[its], ratios[its]
        views.append(
            SampleView(
                group=group.number,
                index=trajectory.index,
                reward=trajectory.reward,
                turns=len(trajectory.turns),
                tokens=int(its.sum()),
                versions=(int(versions.min()), int(versions.max())),
                staleness=batch.step - 1 - int(versions.min()),
                ratio_mean=float(ratio.mean()),
                ratio_max=float(ratio.max()),
                advantage_mean=float(advantages.mean()),
                advantage_min=float(advantages.min()),
                advantage_max=float(advantages.max()),
            )
        )
    return views


def _whole(folder: Path) -> dict[int, Checkpoint]:
    found: dict[int, Checkpoint] = {}
    for path in folder.glob(f"{PREFIX}*"):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError:
            continue
        found[checkpoint.state.step] = checkpoint
    return found


def _compare(step: int, trainer: PolicyTrainer, checkpoint: Path) -> WeightComparison:
    saved = {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}
    made = {name: tensor.cpu() for name, tensor in trainer.whole_tensors()}
    shared = made.keys() & saved.keys()
    equal = made.keys() == saved.keys() and all(torch.equal(made[name], saved[name]) for name in shared)
    largest = max((_difference(made[name], saved[name]) for name in shared), default=math.inf)
    return WeightComparison(step, equal, len(shared), largest)


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max()) if one.shape == other.shape else math.inf


def _verdict(compared: Sequence[WeightComparison], step: int) -> str:
    newest = compared[-1] if compared else None
    if newest is None or newest.step != step:
        return ""
    if newest.equal:
        return f", weights equal to the checkpoint's, bit for bit ({newest.tensors} tensors)"
    return f", weights DIFFER from the checkpoint's by up to {newest.largest_difference:.3g}"
