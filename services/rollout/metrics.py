from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.services.buffer.members import Addition
from offbeat.services.messages.types import Completion, EpisodeKind, Trajectory
from offbeat.services.reward.sample import GroupMember
from offbeat.services.telemetry import MetricRecord, Partial

SOURCE = "rollout"
OWN_METRICS = frozenset(
    (
        *("episodes", "episode_s", "trajectory_tokens", "baseline_reward", "reward", "failures", "cancelled", "turns"),
        *("playing", "episode_limit", "hung_threads", "generation_calls", "cpu_s"),
        *("tokens_sampled", "generation_s", "generation_max_s", "env_s", "env_max_s", "reward_s", "reward_max_s"),
        *("group_reward_s", "group_reward_max_s"),
    )
)
OWN_PREFIXES = ("stop/", "error/", "failed/", "submitted/", "reward_failed/")
"""Reserved; an env's becomes `env/<name>`."""


@dataclass(slots=True)
class _Calls:
    turns: int = 0
    tokens: int = 0
    generation_s: float = 0.0
    generation_max_s: float = 0.0
    env_calls: int = 0
    env_s: float = 0.0
    env_max_s: float = 0.0

    def parts(self) -> dict[str, Partial]:
        of_policy = {
            "turns": Partial("sum", float(self.turns), float(self.turns)),
            "tokens_sampled": Partial("sum", float(self.tokens), float(self.turns)),
            "generation_s": Partial("mean", self.generation_s, float(self.turns)),
            "generation_max_s": Partial("max", self.generation_max_s),
        }
        of_env = {
            "env_s": Partial("mean", self.env_s, float(self.env_calls)),
            "env_max_s": Partial("max", self.env_max_s),
        }
        return {**(of_policy if self.turns else {}), **(of_env if self.env_calls else {})}


class WorkerMetrics:
    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._totals: defaultdict[tuple[str, str], dict[str, Partial]] = defaultdict(dict)
        self._calls: defaultdict[tuple[str, str], _Calls] = defaultdict(_Calls)

    def finished(self, kind: EpisodeKind, trajectory: Trajectory, *, is_scored: bool = True) -> None:
        """Count an episode. is_scored: its reward is whole."""
        add = self._adder(kind, trajectory.tag)
        add("episodes", Partial("sum", 1.0))
        add("episode_s", Partial("mean", trajectory.duration_s))
        add("trajectory_tokens", Partial("mean", float(trajectory.num_tokens)))
        add(f"stop/{trajectory.stop_reason.value}", Partial("sum", 1.0))
        if trajectory.error:
            add(f"error/{trajectory.error.partition(':')[0]}", Partial("sum", 1.0))
        if trajectory.baseline:
            add("baseline_reward", Partial("mean", trajectory.reward))
            return
        if is_scored:
            add("reward", Partial("mean", trajectory.reward))
        for name, value in trajectory.metrics.items():
            is_reserved = name in OWN_METRICS or name.startswith(OWN_PREFIXES)
            add(f"env/{name}" if is_reserved else name, Partial("mean", value))

    def failed(self, kind: EpisodeKind, tag: str, reason: str) -> None:
        add = self._adder(kind, tag)
        add("failures", Partial("sum", 1.0))
        add(f"failed/{reason}", Partial("sum", 1.0))

    def scored(self, kind: EpisodeKind, tag: str, seconds: float) -> None:
        add = self._adder(kind, tag)
        add("reward_s", Partial("mean", seconds))
        add("reward_max_s", Partial("max", seconds))

    def group_scored(
        self, tag: str, members: Sequence[GroupMember], additions: Sequence[Addition], seconds: float
    ) -> None:
        """Count the rewards of a whole group."""
        add = self._adder(EpisodeKind.TRAIN, tag)
        add("group_reward_s", Partial("mean", seconds))
        add("group_reward_max_s", Partial("max", seconds))
        for member, addition in zip(members, additions, strict=True):
            add("reward", Partial("mean", member.own_reward + addition.score))
            for name, value in addition.metrics.items():
                add(name, Partial("mean", value))

    def submitted(self, kind: EpisodeKind, tag: str, result: str) -> None:
        """Count the buffer's response."""
        self._adder(kind, tag)(f"submitted/{result}", Partial("sum", 1.0))

    def cancelled(self, kind: EpisodeKind, tag: str) -> None:
        self._adder(kind, tag)("cancelled", Partial("sum", 1.0))

    def turn(self, kind: EpisodeKind, tag: str, completion: Completion, generation_s: float) -> None:
        calls = self._calls[kind.value, tag]
        calls.turns += 1
        calls.tokens += len(completion.token_ids)
        calls.generation_s += generation_s
        calls.generation_max_s = max(calls.generation_max_s, generation_s)

    def env_call(self, kind: EpisodeKind, tag: str, env_s: float) -> None:
        calls = self._calls[kind.value, tag]
        calls.env_calls += 1
        calls.env_s += env_s
        calls.env_max_s = max(calls.env_max_s, env_s)

    def records(
        self,
        *,
        playing: int,
        hung_threads: int,
        calls: int,
        cpu_s: float,
        failed_attempts: Mapping[str, int],
        episode_limit: int | None = None,
    ) -> list[MetricRecord]:
        """Return and reset counts: per kind and tag, and the worker's. failed_attempts: by `reward/reason`."""
        for key, counters in self._calls.items():
            self._totals[key].update(counters.parts())
        totals, self._totals = self._totals, defaultdict(dict)
        self._calls.clear()
        own = {
            "playing": Partial("mean", float(playing)),
            "hung_threads": Partial("max", float(hung_threads)),
            "generation_calls": Partial("sum", float(calls)),
            "cpu_s": Partial("sum", cpu_s),
            **{f"reward_failed/{name}": Partial("sum", float(count)) for name, count in failed_attempts.items()},
        }
        if episode_limit is not None:
            own["episode_limit"] = Partial("mean", float(episode_limit))
        labels = {"worker": self._worker_id}
        by_tag = [
            MetricRecord(SOURCE, values, labels={**labels, "kind": kind, "tag": tag})
            for (kind, tag), values in totals.items()
        ]
        return [*by_tag, MetricRecord(SOURCE, own, labels=labels)]

    def _adder(self, kind: EpisodeKind, tag: str) -> "_Adder":
        return _Adder(self._totals[kind.value, tag])


class _Adder:
    def __init__(self, values: dict[str, Partial]) -> None:
        self._values = values

    def __call__(self, name: str, part: Partial) -> None:
        before = self._values.get(name)
        self._values[name] = part if before is None else before.merge(part)
