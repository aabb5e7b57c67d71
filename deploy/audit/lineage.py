"""Surviving lineage of weights: each step once, as last trained."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from offbeat.trainer.learner.step_ledger import JournalLine, LeaseLine, ReconciledLine, ResumedLine, StepLine


@dataclass
class Lineage:
    steps: list[StepLine] = field(default_factory=list[StepLine])
    first: int = 1
    """Above 1 if resumed from another run's checkpoint."""
    restored_to: int = 0
    """Step up to which Redis lost data."""
    rewound: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Step -> its groups, in a lineage without checkpoints."""
    rewound_to: int | None = None
    """Checkpoint's step after a rewind."""
    repeated: int = 0
    """Repeated after a learner's death."""
    incarnation: int = 0
    """Of the run's data in Redis."""
    lost_to: int = -1
    """Step after which Redis may have lost unsaved groups."""
    newest_version: dict[int, int] = field(default_factory=dict[int, int])
    """Step -> newest version published before a repetition."""
    learners: int = 0
    skipped: list[int] = field(default_factory=list[int])
    """Steps with a non-finite gradient."""
    findings: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def last(self) -> int:
        """Return the newest step, or `first - 1`."""
        return self.first + len(self.steps) - 1


def trace(journal: Iterable[JournalLine]) -> Lineage:
    lineage = Lineage()
    before: dict[int, StepLine] = {}
    epoch = fenced = newest = 0
    for line in journal:
        if isinstance(line, LeaseLine):
            continue
        if line.epoch < epoch:
            fenced += 1
            continue
        epoch = line.epoch
        if isinstance(line, ResumedLine):
            _resume(lineage, line, before)
            newest = max(newest, line.newest_version)
        elif isinstance(line, ReconciledLine):
            _reconcile(lineage, line, before)
        else:
            lineage.newest_version[line.step] = newest
            _add(lineage, line, before)
        newest = max(newest, line.step)
    if fenced:
        lineage.notes.append(f"{fenced} lines of a learner that had been replaced: passed over")
    if lineage.repeated:
        lineage.notes.append(f"{lineage.repeated} steps were trained again after a learner's death, on the same groups")
    if lineage.skipped:
        lineage.notes.append(f"steps without a finite gradient, which left the weights alone: {lineage.skipped}")
    return lineage


def _resume(lineage: Lineage, line: ResumedLine, before: dict[int, StepLine]) -> None:
    lineage.learners += 1
    if not lineage.steps:
        lineage.first = line.step + 1
    elif line.step > lineage.last or line.step < lineage.first - 1:
        lineage.findings.append(
            f"a learner (epoch {line.epoch}) resumed from step {line.step}, but the ledger ends at step {lineage.last}"
        )
    keep = max(0, line.step - lineage.first + 1)
    undone, lineage.steps = lineage.steps[keep:], lineage.steps[:keep]
    if line.restored > 0:
        lineage.restored_to = line.step
    if line.restored < 0:
        lineage.rewound_to = line.step
    is_lost = line.incarnation != lineage.incarnation or line.step <= lineage.lost_to
    lineage.incarnation = line.incarnation
    if line.restored:
        lineage.rewound |= {each.step: [group.number for group in each.groups] for each in undone}
    if line.restored or is_lost:  # groups of these steps are gone, or counted out: others come in their place
        before.clear()
    else:
        before |= {each.step: each for each in undone}
    lineage.skipped = [step for step in lineage.skipped if step <= line.step]


def _reconcile(lineage: Lineage, line: ReconciledLine, before: dict[int, StepLine]) -> None:
    """Allow repetition of unsaved steps on other groups, after a loss in Redis."""
    lineage.incarnation = line.incarnation
    lineage.lost_to = line.step
    before.clear()
    lineage.notes.append(
        f"Redis was restarted or replaced at step {line.step}: its data was reconciled as incarnation {line.incarnation}, "
        f"{line.corrected} groups corrected"
    )


def _add(lineage: Lineage, line: StepLine, before: dict[int, StepLine]) -> None:
    if line.step != lineage.last + 1:
        lineage.findings.append(f"ledger/steps.jsonl: step {line.step} follows step {lineage.last}")
        if line.step <= lineage.last:
            return
    earlier = before.pop(line.step, None)
    if earlier is not None:
        lineage.repeated += 1
        numbers, others = (sorted(group.number for group in each.groups) for each in (line, earlier))
        if numbers != others:
            lineage.findings.append(
                f"step {line.step} was repeated on groups {numbers}, and had been trained on {others}"
            )
        elif line.refilled is not None and earlier.refilled is not None:
            numbers, others = sorted(line.refilled), sorted(earlier.refilled)
            if numbers != others:
                lineage.findings.append(
                    f"step {line.step} was repeated with groups {numbers} refilled, and had refilled {others}"
                )
    lineage.steps.append(line)
    if line.skipped:
        lineage.skipped.append(line.step)
