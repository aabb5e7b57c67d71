"""Failing episodes of a run, from its workers' reports."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.services.findings import RunFinding
from offbeat.services.messages.types import EpisodeKind

MAX_FAILED_SHARE = 0.25
"""Share of recent episodes above which failures are reported."""
COUNTED = {"episodes": "episodes", "comparisons": "comparisons of groups"}
"""Key of a worker's report -> what it counts."""
NAME = "failing_episodes"
ENVS, BAD_ROW, BAD_TASK, REWARD = "custom_envs.", "bad_row", "bad_task", "reward_"
CAUSE = "they are repeated, so that only those which pass are trained"
MIN_RECENT = 8
MAX_SILENCE_S = 30.0
"""Age of a report, by the newest worker's, beyond which its worker is gone."""


@dataclass(frozen=True, slots=True)
class FailingEpisodes:
    """Sums over workers of episodes, or of comparisons of whole groups by rewards, and a worker's last failure."""

    finished: int = 0
    failed: int = 0
    recent: int = 0
    recent_failed: int = 0
    limit: int = 0
    key: str = ""
    """Configuration key to change."""
    error: str = ""
    trace: str = ""
    what: str = "episodes"

    @classmethod
    def of(cls, reports: Iterable[Mapping[str, Any]], since: float, counted: str = "episodes") -> "FailingEpisodes":
        """Sum reports made since a Unix time; recent episodes are those of workers that still report.

        counted: a key of `COUNTED`.
        """
        made = [report for report in reports if counted in report and report["at"] >= since]
        if not made:
            return cls()
        times = [report.get("received", report["at"]) for report in made]  # older workers report `at` alone
        outcomes = [report[counted] for report in made]
        alive = [each for each, at in zip(outcomes, times, strict=True) if at >= max(times) - MAX_SILENCE_S]
        sums = {key: sum(each[key] for each in outcomes) for key in ("finished", "failed")}
        sums |= {key: sum(each[key] for each in alive) for key in ("recent", "recent_failed")}
        last = next((each for each in [*alive, *outcomes] if each.get("error")), {})
        key = last.get("key") or f"custom_envs.{last.get('tag', '')}"  # older workers report the tag
        named = {name: last.get(name, "") for name in ("error", "trace")}
        limit = max(each["limit"] for each in outcomes)
        return cls(**sums, limit=limit, key=key, **named, what=COUNTED[counted])

    @property
    def all_failed(self) -> bool:
        """Return whether every episode failed, and enough of them."""
        return not self.finished and bool(self.limit) and self.failed >= self.limit

    @property
    def many_fail(self) -> bool:
        return self.recent >= MIN_RECENT and self.recent_failed > MAX_FAILED_SHARE * self.recent

    def describe_all(self) -> str:
        trial = "; `offbeat env check` and `offbeat play` try it without a run" if self.key.startswith(ENVS) else ""
        what = f"all of the first {self.failed} {self.what} failed: {self.error}"
        return f"{what}\nFix {self.key}{trial}.\n\n{self.trace}".rstrip()

    @property
    def finding(self) -> RunFinding | None:
        if not self.many_fail:
            return None
        cause = f"{CAUSE}; `offbeat runs why --json` has the traceback"
        return RunFinding(NAME, self.describe_many(), cause, (self.key,))

    def describe_many(self) -> str:
        return f"{self.recent_failed} of the last {self.recent} {self.what} failed, in {self.key}: {self.error}"


def read_failing(reports: Iterable[Mapping[str, Any]], since: float) -> list[FailingEpisodes]:
    """Return what failed of a run's episodes, and of the comparisons of its groups."""
    made = list(reports)
    return [FailingEpisodes.of(made, since, counted) for counted in COUNTED]


def find_failing(totals: Mapping[str, float]) -> RunFinding | None:
    """Return the finding about a run. totals: sums of metrics by `source:kind/name`."""
    finished = sum(totals.get(f"rollout:{kind}/episodes", 0.0) for kind in EpisodeKind)
    failed: Counter[str] = Counter()
    for kind in EpisodeKind:
        prefix = f"rollout:{kind}/failed/"
        failed.update({name.removeprefix(prefix): int(n) for name, n in totals.items() if name.startswith(prefix)})
    failed = Counter({reason: n for reason, n in failed.items() if not reason.startswith("generation")})
    num_failed, num_all = failed.total(), int(finished) + failed.total()
    if num_all < MIN_RECENT or num_failed <= MAX_FAILED_SHARE * num_all:
        return None
    reasons = ", ".join(f"{reason} {n}" for reason, n in failed.most_common())
    key = f"{ENVS}TAG"
    if set(failed) == {BAD_ROW}:
        key = "data.dataset_name"
    elif set(failed) == {BAD_TASK}:
        key = "train_env_manager.task_sampler"
    elif all(reason.startswith(REWARD) for reason in failed):
        key = "rewards"
    return RunFinding(NAME, f"{num_failed} of {num_all} episodes failed ({reasons})", CAUSE, (key,))
