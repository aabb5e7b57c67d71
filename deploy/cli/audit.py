"""`offbeat audit`."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from offbeat.deploy import run_folder
from offbeat.deploy.audit.audit import Evidence, audit
from offbeat.deploy.audit.lives import DROPPED, FAILED, OUTCOMES, TRAINED, Audit, GroupLife
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.redis_address import find_url, has_other_run, resolve_url
from offbeat.services.buffer.admin import snapshot_from
from offbeat.services.buffer.api import Counters
from offbeat.services.buffer.group_ledger import (
    LEDGER_FILE,
    LifeEvent,
    count_broken_lines,
    read_events_after,
    read_ledger,
)
from offbeat.services.buffer.scripts import BufferScripts
from offbeat.services.errors import MeshError
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.trainer.learner.step_ledger import STEPS_FILE, JournalLine, StepLine, read_step_ledger
from offbeat.trainer.training.checkpoint import PREFIX, CheckpointError, read_checkpoint, read_uploaded

RUNS = Path("runs")
REDIS_TIMEOUT_S = 3.0


class AuditError(Exception):
    """Run that can't be audited."""


def audit_run(
    run: str, *, console: Console, as_json: bool = False, group: int | None = None, redis_url: str | None = None
) -> int:
    """Audit a run by name or folder; return 0 if proven, else 1. group: also print its life.

    Raises `AuditError` without run or ledger.
    """
    folder = find_folder(run)
    result, evidence = examine(folder, redis_url)
    if group is not None and group not in result.groups:
        raise AuditError(f"run {run} has no group {group}: it has {len(result.groups)}, numbered from 0")
    if as_json:
        json.dump(as_tree(result, evidence, group), console.file, indent=2)
        console.file.write("\n")
    else:
        _show(result, evidence, folder, console, group)
    return 0 if result.proven else 1


def examine(folder: Path, redis_url: str | None = None) -> tuple[Audit, Evidence]:
    """Audit a run's folder. redis_url: overrides the folder's. Raises `AuditError`."""
    try:
        config = read_run(folder / run_folder.CONFIG).model_copy(update={"output_dir": folder})
    except (ConfigError, OSError) as error:
        raise AuditError(f"{folder / run_folder.CONFIG}: {error}") from error
    if not (folder / LEDGER_FILE).is_file() or not (folder / STEPS_FILE).is_file():
        raise AuditError(f"{folder} has no ledger/: its learner trained no step, or an older build wrote it")
    before, broken = read_step_ledger(folder)
    events, counters, complaint = _read_events(folder, config, redis_url)
    evidence = Evidence(
        events=events,
        journal=[*before, *_read_newer(folder, len(before), events)],
        checkpoints=_checkpoints(folder),
        counters=counters,
        groups_per_step=config.rollout_batch_size // config.train_env_manager.group_size,
        max_steps=config.max_steps,
        train_stale=config.buffer.stale_policy == "train",
        broken_lines=broken + count_broken_lines(folder),
    )
    result = audit(evidence)
    if complaint:
        result.notes.append(complaint)
    return result, evidence


def _read_newer(folder: Path, num_read: int, events: Sequence[LifeEvent]) -> Iterator[JournalLine]:
    """Yield lines of the journal that were written while the events were read, whose groups the events have.

    The events may say that those were acknowledged.
    """
    known = {event.number for event in events}
    for line in read_step_ledger(folder)[0][num_read:]:
        if isinstance(line, StepLine) and not known.issuperset(group.number for group in line.groups):
            return
        yield line


def find_folder(run: str) -> Path:
    """Return the folder of a path or name under `runs/`; raises `AuditError`."""
    for folder in (Path(run), RUNS / run):
        if (folder / run_folder.CONFIG).is_file():
            return folder.resolve()
    raise AuditError(f"there is no run in {run} or {RUNS / run}: name its folder")


def _read_events(
    folder: Path, config: RunConfig, redis_url: str | None
) -> tuple[list[LifeEvent], Counters | None, str]:
    """Return ledger, counters, and why Redis is unreadable."""
    events = read_ledger(folder)
    try:
        url = resolve_url(redis_url) or config.redis.url or find_url(folder)
        if url is None and not (folder / "redis").is_dir():
            return events, None, "its Redis is gone: only the files were examined"
        if url is not None:
            with connect(url, patience_s=REDIS_TIMEOUT_S) as redis:
                if has_other_run(redis, config.exp_name, folder):
                    other = f"its Redis has another run {config.exp_name}: only the files were examined"
                    return events, None, other
                events, counters = _with_newest(redis, config.exp_name, events)
            unknown = f"its Redis has no counters of run {config.exp_name}: only the ledger was examined"
            return events, counters, unknown if counters is None else ""
        with EmbeddedRedis(folder / "redis", config.redis) as server, connect(server.url) as redis:
            return *_with_newest(redis, config.exp_name, events), ""
    except (MeshError, RedisError, OSError) as error:
        return events, None, f"its Redis does not answer ({error}): only the files were examined"


def _with_newest(redis: Redis, run_id: str, events: list[LifeEvent]) -> tuple[list[LifeEvent], Counters | None]:
    """Return events and simultaneous counters; None if the run is too fast."""
    scripts = BufferScripts(redis, run_id)
    for _ in range(20):
        while page := read_events_after(redis, run_id, events[-1].id if events else "0"):
            events += page
        reply = scripts("snapshot")
        ledger = {reply[0][i]: reply[0][i + 1] for i in range(0, len(reply[0]), 2)}
        if not ledger or (events and int(ledger.get(b"events", 0)) == events[-1].ordinal):
            return events, snapshot_from(reply).counters if ledger else None
    return events, None


def _checkpoints(folder: Path) -> dict[int, str]:
    result: dict[int, str] = {}
    for path in (folder / "checkpoints").glob(f"{PREFIX}*"):
        try:
            state = read_checkpoint(path).state
            result[state.step] = ""
        except CheckpointError as error:
            if not path.is_dir():
                continue  # the learner has removed it
            digits = path.name.removeprefix(PREFIX)
            result[int(digits) if digits.isdigit() else -1] = str(error)
    # Recorded after each upload had been verified
    return {each.step: "" for each in read_uploaded(folder / "checkpoints")[1]} | result


def as_tree(result: Audit, evidence: Evidence, group: int | None = None) -> dict[str, Any]:
    """Return JSON values, with one life or all."""
    lives = [result.groups[group]] if group is not None else [result.groups[n] for n in sorted(result.groups)]
    return {
        "proven": result.proven,
        "findings": result.findings,
        "notes": result.notes,
        "admitted": len(result.groups),
        "trained": result.count(TRAINED),
        "dropped": result.reasons(DROPPED),
        "failed": result.reasons(FAILED),
        "in_flight": len(result.groups) - sum(result.count(ending) for ending in OUTCOMES),
        "steps": result.lineage.last,
        "steps_repeated": result.lineage.repeated,
        "steps_skipped": result.lineage.skipped,
        "learners": result.lineage.learners,
        "staleness": {str(lag): count for lag, count in result.staleness.items()},
        "checkpoints": {str(step): complaint or "whole" for step, complaint in sorted(evidence.checkpoints.items())},
        "groups": [_life_tree(life) for life in lives],
    }


def _life_tree(life: GroupLife) -> dict[str, Any]:
    rewards = [reward if math.isfinite(reward) else None for reward in life.rewards]
    return asdict(life) | {"rewards": rewards, "state": life.state}


def _show(result: Audit, evidence: Evidence, folder: Path, console: Console, group: int | None) -> None:
    if group is not None:
        console.print(_describe_life(result.groups[group]))
        return
    in_flight = len(result.groups) - sum(result.count(ending) for ending in OUTCOMES)
    table = Table(title=f"{folder}", title_justify="left", show_header=False, box=None)
    table.add_row("groups admitted", str(len(result.groups)))
    table.add_row("= trained", str(result.count(TRAINED)))
    for ending in (DROPPED, FAILED):
        table.add_row(f"+ {ending}", f"{result.count(ending)}{_format_reasons(result.reasons(ending))}")
    table.add_row("+ in flight", str(in_flight))
    table.add_row("steps", f"{result.lineage.last} of {evidence.max_steps}, by {result.lineage.learners} learner(s)")
    table.add_row("lag at consumption", ", ".join(f"{lag}: {count} groups" for lag, count in result.staleness.items()))
    complete = [step for step, complaint in sorted(evidence.checkpoints.items()) if not complaint]
    table.add_row("whole checkpoints", ", ".join(map(str, complete)) or "none")
    console.print(table)
    for note in result.notes:
        console.print(f"  {note}")
    if result.proven:
        failed = result.count(FAILED)
        untrained = f" {failed} group(s) failed and were not trained on." if failed else ""
        console.print(
            "PROVEN: every group admitted is accounted for once; nothing was lost and nothing trained twice."
            + untrained
        )
        return
    console.print(f"NOT PROVEN: {len(result.findings)} finding(s)")
    for finding in result.findings:
        console.print(f"  - {finding}")


def _format_reasons(reasons: dict[str, int]) -> str:
    return f" ({', '.join(f'{reason} {count}' for reason, count in reasons.items())})" if reasons else ""


def _describe_life(life: GroupLife) -> str:
    parts: Sequence[str] = [
        f"group {life.number}: admitted at version {life.admitted_version}",
        *(["submitted"] if life.submitted else []),
        *([f"consumed by step {life.step} (oldest token of version {life.oldest_version})"] if life.step else []),
        {TRAINED: f"trained, in the checkpoint of step {life.detail}"}.get(
            life.ending, f"{life.state} {life.detail}".strip()
        ),
    ]
    return ", ".join(parts)
