"""Metrics of an evaluation, in total and by tag."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import comb

from msgspec import structs

from offbeat.services.messages.types import Trajectory
from offbeat.services.reward.config import COLUMN
from offbeat.services.telemetry import Partial, mean
from offbeat.trainer.learner.episode_success import reports_success, success_values


def evaluation_values(
    trajectories: Sequence[Trajectory], num_episodes: int, *, step: int, group_size: int = 1
) -> dict[str, Partial]:
    """Return metrics, those of tags as `env/TAG/NAME`. group_size: above 1 adds pass@k."""
    failed = Partial("sum", float(num_episodes - len(trajectories)))
    if not trajectories:
        return {"episodes_failed": failed}
    versions = [span for t in trajectories if (span := t.version_range())]
    reported = {t.tag for t in trajectories if reports_success(t)}
    passed = _pass_at_k(_groups(trajectories, num_episodes, group_size, reported), group_size)
    by_tag: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_tag.setdefault(trajectory.tag, []).append(trajectory)
    return {
        **success_values(trajectories, num_episodes - len(trajectories)),
        **passed,
        **_episodes(trajectories),
        "episodes_failed": failed,
        "version_min": Partial("min", float(min((low for low, _ in versions), default=step))),
        "version_max": Partial("max", float(max((high for _, high in versions), default=step))),
        **{
            f"env/{tag}/{name}": value
            for tag, members in by_tag.items()
            for name, value in _tag_values(members, num_episodes, group_size).items()
        },
    }


def drop_unanswered(trajectories: Sequence[Trajectory], group_size: int) -> list[Trajectory]:
    """Return the episodes of answered prompts.

    group_size: episodes of a prompt.
    """
    long = sorted({t.index // group_size for t in trajectories if not t.turns})
    return [
        structs.replace(t, index=t.index - group_size * bisect_left(long, t.index // group_size))
        for t in trajectories
        if t.turns
    ]


def _episodes(trajectories: Sequence[Trajectory]) -> dict[str, Partial]:
    turns = [turn for t in trajectories for turn in t.turns]
    lengths = [float(t.num_sampled) for t in trajectories]
    return {
        "reward": mean(t.reward for t in trajectories),
        "reward_min": Partial("min", min(t.reward for t in trajectories)),
        "reward_max": Partial("max", max(t.reward for t in trajectories)),
        **_rewards(trajectories),
        "turns": mean(float(len(t.turns)) for t in trajectories),
        "tokens/response_length/mean": mean(lengths),
        "tokens/response_length/min": Partial("min", min(lengths)),
        "tokens/response_length/max": Partial("max", max(lengths)),
        "episodes": Partial("sum", float(len(trajectories))),
        "episodes_truncated": mean(float(t.is_truncated) for t in trajectories),
        **({"answers_truncated": mean(float(turn.is_truncated) for turn in turns)} if turns else {}),
    }


def _rewards(trajectories: Sequence[Trajectory]) -> dict[str, Partial]:
    names = dict.fromkeys(name for t in trajectories for name in t.metrics if name.startswith(COLUMN))
    return {name: mean(t.metrics[name] for t in trajectories if name in t.metrics) for name in names}


def _tag_values(members: Sequence[Trajectory], num_episodes: int, group_size: int) -> dict[str, Partial]:
    """Return a tag's metrics, also by seat, over the episodes that did not fail; pass@k as in total, over whole groups."""
    groups: dict[int, list[bool]] = {}
    if any(map(reports_success, members)):
        for trajectory in members:
            groups.setdefault(trajectory.index // group_size, []).append(is_success(trajectory))
    whole = [
        group + [False] * (group_size - len(group))
        for number, group in groups.items()
        if number < num_episodes // group_size
    ]
    return {**success_values(members), **_pass_at_k(whole, group_size), **_episodes(members), **_seats(members)}


def _seats(members: Sequence[Trajectory]) -> dict[str, Partial]:
    """Return success and reward of each seat, over the games that report them."""
    games = [t.metrics for t in members if t.seats]
    seats = sorted({name.removesuffix("/reward") for metrics in games for name in metrics if name.endswith("/reward")})
    names = (f"{seat}/{name}" for seat in seats for name in ("success", "reward"))
    values = ((name, [t.metrics[name] for t in members if name in t.metrics]) for name in names)
    return {name: mean(reported) for name, reported in values if reported}


def _groups(
    trajectories: Iterable[Trajectory], num_episodes: int, group_size: int, reported: set[str]
) -> list[list[bool]]:
    """Return successes of each complete group of tags that report any; episodes without one are failures."""
    if not reported:
        return []
    groups = [[False] * group_size for _ in range(num_episodes // group_size)]
    silent: set[int] = set()
    for trajectory in trajectories:
        number, place = divmod(trajectory.index, group_size)
        if trajectory.tag not in reported:
            silent.add(number)
        elif number < len(groups):
            groups[number][place] = is_success(trajectory)
    return [group for number, group in enumerate(groups) if number not in silent]


def _pass_at_k(groups: Sequence[Sequence[bool]], group_size: int) -> dict[str, Partial]:
    """Return pass@k for the powers of two from 2 on and the group size."""
    ks = sorted({*(1 << n for n in range(1, group_size.bit_length())), group_size} - {1})
    count = float(len(groups))
    return {f"pass@{k}": Partial("mean", pass_at_k(groups, k) * count, count) for k in ks if groups}


def pass_at_k(groups: Sequence[Sequence[bool]], k: int) -> float:
    """Return mean unbiased pass@k: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374).

    Raises ValueError for a group of fewer than `k` episodes.
    """
    if not groups or any(len(group) < k for group in groups):
        raise ValueError(f"pass@{k} needs groups of at least {k} episodes")
    return sum(1 - comb(len(group) - sum(group), k) / comb(len(group), k) for group in groups) / len(groups)


def is_success(trajectory: Trajectory) -> bool:
    return reports_success(trajectory) and trajectory.metrics["success"] > 0
