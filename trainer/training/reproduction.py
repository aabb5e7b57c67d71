"""Training repeated from a checkpoint and recorded batches.

Invariant: the run's folder is only read.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from offbeat.services.errors import ControlError
from offbeat.services.generation.checkpoint_names import checkpoint_tensors
from offbeat.services.messages.types import Group
from offbeat.trainer.checks.function_keys import user_functions
from offbeat.trainer.config.aliases import canonical_json
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.config.scored_roles import Placement, scored_roles
from offbeat.trainer.data.seats import list_members
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint import (
    PREFIX,
    Checkpoint,
    CheckpointError,
    read_checkpoint,
    read_uploaded,
)
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from offbeat.trainer.training.score_keys import role_of_key


@dataclass(frozen=True, slots=True)
class SampleView:
    """Trajectory before its batch's first step."""

    group: int
    index: int
    reward: float
    turns: int
    tokens: int
    """Trained tokens."""
    versions: tuple[int, int]
    staleness: int
    ratio_mean: float
    """Mean of exp(policy's - recorded logprob)."""
    ratio_max: float
    advantage_mean: float
    advantage_min: float
    advantage_max: float


@dataclass(frozen=True, slots=True)
class WeightComparison:
    step: int
    equal: bool
    """Bitwise equality."""
    tensors: int
    largest_difference: float


@dataclass(frozen=True, slots=True)
class ReproductionResult:
    start: int
    steps: tuple[int, ...]
    compared: tuple[WeightComparison, ...]
    samples: tuple[SampleView, ...] = ()


@dataclass(frozen=True, slots=True)
class ReproductionPlan:
    start: Checkpoint
    steps: tuple[int, ...]
    checkpoints: dict[int, Checkpoint]


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """Steps that were trained under one configuration."""

    run: LearnerRun
    start: Checkpoint
    steps: list[int]


def find_plan(run: LearnerRun, step: int | None) -> ReproductionPlan:
    """Return the plan to reach `step`, or the longest between checkpoints.

    Raises:
        ControlError: checkpoints or batches are missing.
    """
    checkpoints = _surviving_checkpoints(run.checkpoints)
    recorded = BatchLog(run.output_dir).steps()
    if not recorded:
        raise ControlError(
            f"{run.output_dir} holds no recorded batches: set record_batches to the steps to keep, and train"
        )
    goals = [step] if step is not None else sorted(checkpoints, reverse=True)
    for goal in goals:
        for start in sorted(checkpoints) if step is None else sorted(checkpoints, reverse=True):
            needed = tuple(range(start + 1, goal + 1))
            if needed and set(needed) <= set(recorded):
                passed = {n: checkpoint for n, checkpoint in checkpoints.items() if start < n <= goal}
                return ReproductionPlan(checkpoints[start], needed, passed)
    have = (
        f"recorded are steps {recorded[0]} to {recorded[-1]}, complete checkpoints of the run's present weights are of "
        f"steps {sorted(checkpoints)}{_describe_uploads(run.checkpoints)}"
    )
    if step is None:
        raise ControlError(f"no two checkpoints with every batch between them: {have}")
    raise ControlError(f"no way to step {step} from a checkpoint before it: {have}")


def _describe_uploads(folder: Path) -> str:
    url, uploaded = read_uploaded(folder)
    names = ", ".join(each.name for each in uploaded if not (folder / each.local_name).is_dir())
    return f" (in {url} alone are {names}: download them to {folder}/step-NUMBER)" if names else ""


def reproduce(
    run: LearnerRun, plan: ReproductionPlan, ranks: Ranks, *, sample_step: int | None, show: Callable[[str], None]
) -> ReproductionResult:
    """Run the plan in the process group of `ranks`; `show` receives progress.

    Raises:
        ControlError: a checkpoint was written by several processes, or its configuration can't be read.
        CodecError: an unreadable batch.
        ValueError: a group without scores of a service or of files.
    """
    batch_log = BatchLog(run.output_dir)
    compared: list[WeightComparison] = []
    samples: Sequence[SampleView] = ()
    for segment in split_plan(run, plan):
        trainer = _load_trainer(segment, ranks)
        show(f"from {segment.start.path}")
        for step in segment.steps:
            recorded = batch_log.read(step, segment.run.config)
            batch = key_scores_by_role(recorded.batch)
            trainer.set_learning_rate(recorded.learning_rate)
            if step == sample_step:
                samples = preview(trainer, batch)
            trainer.train(batch)
            if step in plan.checkpoints:
                compared.append(_compare(step, trainer, plan.checkpoints[step].path))
            show(f"step {step}: {len(batch.groups)} groups{_describe(compared, step)}")
        del trainer  # before the next one's models
    return ReproductionResult(plan.start.state.step, plan.steps, tuple(compared), tuple(samples))


def split_plan(run: LearnerRun, plan: ReproductionPlan) -> list[PlanSegment]:
    """Split the steps where the run was resumed with other keys, as its checkpoints say.

    Raises:
        ControlError: a checkpoint's configuration can't be read, or names a function that the run's does not.
    """
    configs = {step: _trained_config(run, checkpoint) for step, checkpoint in sorted(plan.checkpoints.items())}
    segments: list[PlanSegment] = []
    for step in plan.steps:
        config = next((config for until, config in configs.items() if until >= step), run.config)
        if segments and segments[-1].run.config == config:
            segments[-1].steps.append(step)
        else:
            segments.append(
                PlanSegment(replace(run, config=config), plan.checkpoints.get(step - 1, plan.start), [step])
            )
    return segments


def _trained_config(run: LearnerRun, checkpoint: Checkpoint) -> LearnerRunConfig:
    """Return the configuration of the learner that wrote a checkpoint, with this machine's device and paths."""
    if not checkpoint.state.config:  # of an earlier build
        return run.config
    try:
        text = canonical_json(json.dumps(checkpoint.state.config))
        config = LearnerRunConfig.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise ControlError(f"{checkpoint.path} has a configuration that this build can't read: {error}") from error
    here = run.config
    if unnamed := set(user_functions(config).values()) - set(user_functions(here).values()):  # config.yaml is trusted
        raise ControlError(
            f"{checkpoint.path} was trained with {', '.join(sorted(unnamed))}, which the run's configuration does not name"
        )
    adapter = {"adapter_name_or_path": here.actor_train.model_args.adapter_name_or_path}
    args = config.actor_train.model_args.model_copy(update=adapter)
    train = config.actor_train.model_copy(update={"device": here.actor_train.device, "model_args": args})
    return config.model_copy(update={"actor_train": train, "output_dir": here.output_dir, "pretrain": here.pretrain})


def _load_trainer(segment: PlanSegment, ranks: Ranks) -> PolicyTrainer:
    path, state = segment.start.path, segment.start.state
    config = segment.run.config.model_copy(update={"profiler_timeline": False, "profiler_memory": False})
    if state.num_processes != 1:
        raise ControlError(
            f"{path} was written by {state.num_processes} processes: only training by one process is "
            "reproducible bit for bit"
        )
    torch.set_num_threads(config.actor_train.num_threads)
    torch.manual_seed(config.seed)
    trainer = PolicyTrainer(replace(segment.run, config=config), ranks, recorded_scores=_recorded_scores(config))
    trainer.load(path, state.kl_coef)
    return trainer


def _recorded_scores(config: LearnerRunConfig) -> dict[str, str]:
    """Return role -> key of `key_scores_by_role`."""
    placements: tuple[Placement, ...] = ("service", "files")
    names = [role.name for each in placements for role in scored_roles(config, config.reference, each)]
    return {name: name for name in names}


def key_scores_by_role(batch: StepBatch) -> StepBatch:
    """Return the batch with its scores under their roles' names.

    The keys of services and files name the lineage and the files' times, which the run in the folder need not have any
    more. Of several scores of a role, a group was trained with the last.
    """

    def rename(group: Group) -> Group:
        return replace(group, scores={role_of_key(key): blob for key, blob in group.scores.items()})

    return replace(batch, groups=tuple(map(rename, batch.groups)), shaped=tuple(map(rename, batch.shaped)))


def preview(trainer: PolicyTrainer, batch: StepBatch) -> list[SampleView]:
    inputs = trainer.preview(batch)
    if inputs is None:
        return []
    packed, targets = inputs.batch, inputs.targets
    ratios = (inputs.logprobs - packed.behavior_logprobs).exp()
    views: list[SampleView] = []
    for i, (number, trajectory) in enumerate(list_members(inputs.groups)):
        tokens = packed.trajectory == i
        if not bool(tokens.any()):
            continue
        versions, advantages, ratio = packed.versions[tokens], targets.advantages[tokens], ratios[tokens]
        views.append(
            SampleView(
                group=number,
                index=trajectory.index,
                reward=trajectory.reward,
                turns=len(trajectory.turns),
                tokens=int(tokens.sum()),
                versions=(int(versions.min()), int(versions.max())),
                staleness=batch.step - int(versions.min()),
                ratio_mean=float(ratio.mean()),
                ratio_max=float(ratio.max()),
                advantage_mean=float(advantages.mean()),
                advantage_min=float(advantages.min()),
                advantage_max=float(advantages.max()),
            )
        )
    return views


def _surviving_checkpoints(folder: Path) -> dict[int, Checkpoint]:
    """Return the complete checkpoints, without those after whose writing the run went back before their steps."""
    complete: list[Checkpoint] = []
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(CheckpointError):
            complete.append(read_checkpoint(path))
    surviving: dict[int, Checkpoint] = {}
    for checkpoint in sorted(complete, key=lambda each: (each.state.serial, each.state.step), reverse=True):
        if checkpoint.state.step < min(surviving, default=math.inf):
            surviving[checkpoint.state.step] = checkpoint
    return surviving


def _compare(step: int, trainer: PolicyTrainer, checkpoint: Path) -> WeightComparison:
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    files = [each for path in checkpoint.glob("*.safetensors") for each in load_file(path).items()]
    saved = dict(checkpoint_tensors(config, files))  # earlier builds wrote the names in memory
    reproduced = dict(checkpoint_tensors(config, ((name, each.cpu()) for name, each in trainer.exported_tensors())))
    shared = reproduced.keys() & saved.keys()
    all_equal = all(torch.equal(reproduced[name], saved[name]) for name in shared)
    equal = reproduced.keys() == saved.keys() and all_equal
    largest = max((_max_difference(reproduced[name], saved[name]) for name in shared), default=math.inf)
    return WeightComparison(step, equal, len(shared), largest)


def _max_difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max()) if one.shape == other.shape else math.inf


def _describe(compared: Sequence[WeightComparison], step: int) -> str:
    newest = compared[-1] if compared else None
    if newest is None or newest.step != step:
        return ""
    if newest.equal:
        return f", weights equal to the checkpoint's, bit for bit ({newest.tensors} tensors)"
    return f", weights DIFFER from the checkpoint's by up to {newest.largest_difference:.3g}"
