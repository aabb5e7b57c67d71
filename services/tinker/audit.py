"""Proof that a model's weights contain each acknowledged command once.

Each command's entry has the version and the gradient's sequences after it. A command that was lost, or applied twice,
changes the weights and both counts alike, also in a learner that repeats commands after a kill.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.services.tinker.records import AppliedCommand, CheckpointRecord, StepMetrics

CHANGES = {"optim_step", "load_weights"}
"""Commands that change the weights, and clear the gradient."""
ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class CommandEvidence:
    """applied: last acknowledged command, -1: none; commands, steps: by sequence id; checkpoints: by path;
    sampled: versions of sampled tokens; diverged: repetitions that have left another state."""

    applied: int
    commands: Mapping[int, AppliedCommand]
    steps: Mapping[int, StepMetrics]
    checkpoints: Mapping[str, CheckpointRecord]
    sampled: frozenset[int] = frozenset()
    diverged: Mapping[int, AppliedCommand] = field(default_factory=dict[int, AppliedCommand])


def find_problems(evidence: CommandEvidence) -> list[str]:
    checks = (_check_order, _check_repeated, _check_weights, _check_named)
    return [problem for check in checks for problem in check(evidence)]


def _check_order(evidence: CommandEvidence) -> Iterator[str]:
    if missing := sorted(set(range(evidence.applied + 1)) - evidence.commands.keys()):
        yield (
            f"command {missing[0]} has no entry, {len(missing)} in all: models of builds before this audit have none, and "
            "those of an ended session lose them after 30 days"
        )


def _check_repeated(evidence: CommandEvidence) -> Iterator[str]:
    if evidence.diverged:
        seq_id, repeated = min(evidence.diverged.items())
        yield (
            f"command {seq_id} ({repeated.kind}) was repeated after a kill and left version {repeated.version} and a "
            f"gradient of {repeated.num_sequences} sequences, not what was acknowledged"
        )


def _check_weights(evidence: CommandEvidence) -> Iterator[str]:
    """Compare each entry with its predecessor's; one that was refused without the model has left all as it was."""
    last: AppliedCommand | None = None
    for seq_id in sorted(evidence.commands):
        command, before = evidence.commands[seq_id], last if seq_id - 1 in evidence.commands else None
        if command.version is None:
            continue
        last = command
        if before is None or before.version is None:
            continue
        is_change = command.kind in CHANGES and not command.is_refused
        expected = before.version + is_change, 0 if is_change else before.num_sequences + command.num_added
        if command.kind == "optim_step" and command.is_refused and not command.num_sequences:
            expected = before.version, 0  # a gradient that is not finite is cleared
        if (command.version, command.num_sequences) != expected:
            yield (
                f"command {seq_id} ({command.kind}) left version {command.version} and a gradient of "
                f"{command.num_sequences} sequences: version {expected[0]} and {expected[1]} follow from {seq_id - 1}"
            )
        step = evidence.steps.get(seq_id)
        if (command.kind == "optim_step" and not command.is_refused) != (step is not None):
            yield f"command {seq_id} ({command.kind}) has {'an' if step else 'no'} optimizer step among the metrics"
        elif step is not None and (step.version, step.num_sequences) != (command.version, before.num_sequences):
            yield f"the metrics of command {seq_id} are of version {step.version} and {step.num_sequences} sequences"


def _check_named(evidence: CommandEvidence) -> Iterator[str]:
    """Compare checkpoints and sampled tokens with the versions that they name."""
    for path, record in evidence.checkpoints.items():
        folder = Path(record.adapter.folder)
        saved = evidence.commands.get(int(folder.name.rpartition("@")[2]))
        if saved is not None and saved.version != record.adapter.version:
            yield f"{path} is of version {record.adapter.version}, and its command saved {saved.version}"
        if not (folder / ADAPTER).is_file():
            yield f"{path} has no file {folder / ADAPTER}"
    newest = max((each.version for each in evidence.commands.values() if each.version is not None), default=None)
    if newest is not None and (unknown := sorted(each for each in evidence.sampled if each > newest)):
        yield f"tokens were sampled by version {unknown[0]}, and {newest} is the newest"
