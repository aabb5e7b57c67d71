"""Proof that no group was lost or trained twice.

Sources: the ledgers of buffer (`ledger/groups.jsonl`) and learner (`ledger/steps.jsonl`), checkpoints and counters.
Invariant: violations name their group, step or file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from offbeat.deploy.audit.lives import DROPPED, FAILED, TRAINED, Audit, replay
from offbeat.services.buffer.api import Counters
from offbeat.services.buffer.group_ledger import LifeEvent
from offbeat.trainer.learner.step_ledger import JournalLine

SHOWN = 8


@dataclass(frozen=True, slots=True)
class Evidence:
    events: Sequence[LifeEvent]
    journal: Sequence[JournalLine]
    checkpoints: dict[int, str] = field(default_factory=dict[int, str])
    """Step -> problem, or empty."""
    counters: Counters | None = None
    """Of the Redis with the newest events."""
    groups_per_step: int = 1
    max_steps: int = 0
    train_stale: bool = False
    """`buffer.stale_policy: train`, which ledgers of older builds do not have."""
    broken_lines: int = 0


def audit(evidence: Evidence) -> Audit:
    result = replay(evidence.events, evidence.journal)
    if result.num_restored:
        result.notes.append(f"{result.num_restored} groups were counted as trained again, as Redis had forgotten them")
    result.findings += _check_numbers(result)
    result.findings += _check_steps(evidence, result)
    result.findings += _check_acknowledgements(evidence, result)
    result.findings += _check_counters(evidence, result)
    result.findings += _end(evidence, result)
    if evidence.broken_lines:
        result.notes.append(
            f"{evidence.broken_lines} cut lines in ledger/, of a disk that was full or a process that died"
        )
    return result


def _check_numbers(result: Audit) -> Iterator[str]:
    if not result.groups or result.lineage.restored_to or result.lineage.first > 1:
        return
    missing = [number for number in range(max(result.groups)) if number not in result.groups]
    if missing:
        yield f"{name_numbers('group', missing)} never admitted, though group {max(result.groups)} was"


def _check_steps(evidence: Evidence, result: Audit) -> Iterator[str]:
    trained_at: dict[int, int] = {}
    for line in result.lineage.steps:
        if len(line.groups) != evidence.groups_per_step:
            yield f"step {line.step} consumed {len(line.groups)} groups instead of {evidence.groups_per_step}"
        for each in line.groups:
            if each.number in trained_at:
                yield f"group {each.number} was trained twice: at step {trained_at[each.number]} and at step {line.step}"
            trained_at[each.number] = line.step
            lag = line.step - 1 - each.oldest_version
            if each.oldest_version > max(line.step - 1, result.lineage.newest_version.get(line.step, 0)):
                yield f"group {each.number} of step {line.step} holds tokens of the later version {each.oldest_version}"
            if not evidence.train_stale and lag - 1 >= line.max_staleness:
                bound = f"{line.max_staleness:g}"
                yield f"group {each.number} was trained at step {line.step} with a lag of {lag}, above {bound}"
            life = result.groups.get(each.number)
            if life is None:
                yield f"group {each.number} of step {line.step} is not in the buffer's ledger"
            elif life.ending in (DROPPED, FAILED):
                yield f"group {each.number} was trained at step {line.step}, and {life.ending} ({life.detail})"


def _check_acknowledgements(evidence: Evidence, result: Audit) -> Iterator[str]:
    """Check that groups left only with a durable checkpoint."""
    trained = [life for life in result.groups.values() if life.ending == TRAINED]
    newest = max((int(life.detail) for life in trained), default=0)
    if result.lineage.first == 1:
        orphans = [life.number for life in trained if life.step is None]
        if orphans:
            yield f"{name_numbers('group', orphans)} acknowledged as trained, but in no step of the surviving lineage"
    for life in trained:
        if life.step is not None and life.step > int(life.detail):
            yield f"group {life.number} of step {life.step} was acknowledged by the checkpoint of step {life.detail} before"
    acked_early = [
        life.number for life in result.groups.values() if not life.ending and life.step and life.step <= newest
    ]
    if acked_early:
        yield f"{name_numbers('group', acked_early)} trained by step {newest}, but missing in its acknowledged checkpoint"
    complete = [step for step, complaint in evidence.checkpoints.items() if not complaint]
    for step, complaint in sorted(evidence.checkpoints.items()):
        if complaint:
            yield f"checkpoints/step-{step:06d} can't be used: {complaint}"
    if newest > max(complete, default=0):
        there = (
            f"the newest whole checkpoint is of step {max(complete)}" if complete else "there is no whole checkpoint"
        )
        yield f"groups were acknowledged for step {newest}, but {there}"


def _check_counters(evidence: Evidence, result: Audit) -> Iterator[str]:
    counters = evidence.counters
    if counters is None:
        return
    elsewhere = (result.lineage.first - 1) * evidence.groups_per_step
    pairs = {
        "admitted": (counters.admitted, len(result.groups) + elsewhere),
        TRAINED: (counters.trained, result.count(TRAINED) + elsewhere),
        DROPPED: (sum(counters.dropped.values()) - counters.refilled, result.count(DROPPED)),
        FAILED: (sum(counters.failed.values()), result.count(FAILED)),
    }
    for name, (counted, listed) in pairs.items():
        if counted != listed:
            yield f"Redis counts {counted} groups as {name}, the ledger lists {listed}"


def _end(evidence: Evidence, result: Audit) -> Iterator[str]:
    if not evidence.max_steps or result.lineage.last < evidence.max_steps:
        return
    complete = [step for step, complaint in evidence.checkpoints.items() if not complaint]
    if max(complete, default=0) < evidence.max_steps:
        return
    open_ones = [life.number for life in result.groups.values() if not life.ending]
    if open_ones:
        groups = name_numbers("group", open_ones, past=False)
        yield f"all {evidence.max_steps} steps are trained and saved, but {groups} still open"


def name_numbers(what: str, numbers: Sequence[int], *, past: bool = True) -> str:
    """Return `group 3 was`, or `groups 3, 4, 5 and 17 more were`."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    verb = ("was" if len(numbers) == 1 else "were") if past else ("is" if len(numbers) == 1 else "are")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more} {verb}"
