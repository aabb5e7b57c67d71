"""Explanation of what running episodes wait for."""

from collections.abc import Iterable, Mapping
from typing import Any

from offbeat.services.control.causes import MAX_REPORT_AGE_S, Cause, RunSnapshot, for_seconds

COMPUTING_SHARE = 0.8
"""Share of a core from which a worker, whose Python code runs on one, delays its episodes."""


def explain_workers(snapshot: RunSnapshot, opening: str) -> Cause:
    alive = snapshot.buffer.workers
    if not alive:
        observation = snapshot.observations.get("env-workers")
        how = f" ({observation.health}{f', {observation.detail}' if observation.detail else ''})" if observation else ""
        return Cause("env workers", "absent", f"{opening}no env worker is there{how}")
    playing = sum(worker.episodes for worker in alive)
    text = f"{opening}{len(alive)} env worker(s) run {playing} episodes and claim more as slots become free"
    return Cause("env workers", "busy", text, detail={"workers": len(alive)})


def explain_computing(snapshot: RunSnapshot) -> list[Cause]:
    """Report env workers for whose process their episodes wait."""
    shares = {
        name: share
        for name, report in snapshot.workers.items()
        if snapshot.now - float(report.get("at", 0.0)) < MAX_REPORT_AGE_S
        and (share := float(report.get("cpu", 0.0))) >= COMPUTING_SHARE
    }
    if not shares:
        return []
    is_one = len(shares) == 1
    who = f"env worker {next(iter(shares))} takes" if is_one else f"{len(shares)} env workers take up to"
    runs = f"on which the Python code of all {'its' if is_one else 'their'} episodes runs"
    text = f"{who} {max(shares.values()):.2f} of a core, {runs}: add workers (rollout.num_workers)"
    return [Cause("env workers", "computes", text, detail=shares)]


def explain_episodes(
    snapshot: RunSnapshot, waits: Mapping[str, tuple[int, float]], longest: str | None, still: int
) -> list[Cause]:
    if longest is None:
        silent = [worker for worker in snapshot.buffer.workers if worker.silent_s > MAX_REPORT_AGE_S]
        about = (
            f"their env worker has been silent for {max(worker.silent_s for worker in silent):.0f} s" if silent else ""
        )
        return [Cause("episodes", "unknown", about or "their env workers have not reported yet what they wait for")]
    count, since = waits[longest]
    they = "it waits" if still == 1 else "they wait" if count >= still else f"{count} of them wait{'s' * (count == 1)}"
    detail: dict[str, Any] = {wait: number for wait, (number, _) in waits.items()}
    match longest:
        case "generation":
            first = Cause("episodes", "waits", f"{they} for generation", "generation", snapshot.now - since, detail)
            return [first, _generation(snapshot)]
        case "env":
            text = f"{they} for {'its' if still == 1 else 'their'} env to answer" + for_seconds(snapshot.now - since)
            return [Cause("episodes", "waits", text, "env", snapshot.now - since, detail)]
        case "agent":
            text = f"{they} for {'its' if still == 1 else 'their'} agent to continue" + for_seconds(
                snapshot.now - since
            )
            return [Cause("episodes", "waits", text, "agent", snapshot.now - since, detail)]
        case "reward":
            text = f"{they} for {'its' if still == 1 else 'their'} rewards" + for_seconds(snapshot.now - since)
            return [Cause("episodes", "waits", text, "reward", snapshot.now - since, detail)]
        case "place":
            return [Cause("episodes", "waits", f"{they} for an env of the pool", "env", snapshot.now - since, detail)]
        case _:
            text = "it is being handed in" if still == 1 else "they are being handed in"
            return [Cause("episodes", "waits", text, "buffer", snapshot.now - since, detail)]


def _generation(snapshot: RunSnapshot) -> Cause:
    replicas = {
        name: replica for name, replica in snapshot.replicas.items() if snapshot.now - replica.at < MAX_REPORT_AGE_S
    }
    detail = {"replicas": len(replicas), "newest_version": snapshot.version}
    if not replicas:
        observation = snapshot.observations.get("generation")
        how = f" ({observation.health}{f', {observation.detail}' if observation.detail else ''})" if observation else ""
        return Cause("generation", "absent", f"no replica of which answers{how}", detail=detail)
    whose = "whose replica is" if len(replicas) == 1 else f"of whose {len(replicas)} replicas one is"
    for replica in replicas.values():
        if replica.load.loading is not None:
            since = snapshot.now - replica.load.loading_since
            text = f"{whose} loading version {replica.load.loading} since {since:.1f} s"
            return Cause("generation", "loads", text, None, since, {**detail, "version": replica.load.loading})
    behind = [replica for replica in replicas.values() if replica.load.waiting and replica.version < snapshot.version]
    if behind:
        text = f"which serves version {behind[0].version} and fetches version {snapshot.version}"
        return Cause("generation", "fetches", text, detail=detail)
    running = sum(replica.load.running for replica in replicas.values())
    text = f"which samples {running} request(s) under version {max(replica.version for replica in replicas.values())}"
    return Cause("generation", "samples", text, detail={**detail, "requests": running})


def explain_evaluation(snapshot: RunSnapshot) -> list[Cause]:
    units = {name for report in snapshot.workers.values() for name in report.get("evaluations", {})}
    text = f"The learner waits for an evaluation ({snapshot.learner.phase})"
    first = Cause("learner", "waits", text, "evaluation")
    waits: dict[str, tuple[int, float]] = {}
    for unit in units:
        waits = _merged(waits, count_waits(snapshot.workers.values(), "evaluations", unit, snapshot.now))
    if not waits:
        workers = explain_workers(snapshot, "")
        text = f"{snapshot.buffer.queued_eval} of its episodes are not claimed yet"
        return [first, Cause("evaluation", "queued", text, workers.component), workers]
    playing = sum(number for number, _ in waits.values())
    text = f"{playing} of its episodes are playing and {snapshot.buffer.queued_eval} are queued"
    second = Cause("evaluation", "playing", text, "episodes", detail={"queued": snapshot.buffer.queued_eval})
    episodes = explain_episodes(snapshot, waits, longest_wait(waits), playing)
    return [first, second, *episodes, *explain_computing(snapshot)]


def count_waits(reports: Iterable[Mapping[str, Any]], kind: str, unit: str, now: float) -> dict[str, tuple[int, float]]:
    """Return wait -> (number of episodes, start of the longest), from recent reports."""
    waits: dict[str, tuple[int, float]] = {}
    for report in reports:
        if now - float(report.get("at", 0.0)) < MAX_REPORT_AGE_S:
            entries = report.get(kind, {}).get(unit, {})
            waits = _merged(waits, {wait: (int(number), float(since)) for wait, (number, since) in entries.items()})
    return waits


def _merged(
    one: Mapping[str, tuple[int, float]], other: Mapping[str, tuple[int, float]]
) -> dict[str, tuple[int, float]]:
    out = dict(one)
    for wait, (number, since) in other.items():
        before = out.get(wait, (0, since))
        out[wait] = (before[0] + number, min(before[1], since))
    return out


def longest_wait(waits: Mapping[str, tuple[int, float]]) -> str | None:
    return min(waits, key=lambda wait: waits[wait][1], default=None)
