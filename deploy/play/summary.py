"""Summary of an evaluation by `offbeat rollout`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from offbeat.deploy.play.rollouts import read_success
from offbeat.services.messages.types import Trajectory
from offbeat.trainer.learner.evaluation_metrics import pass_at_k

QUANTILE = 1.96
"""Of the normal distribution, for 95 %."""


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """Means over played episodes."""

    episodes: int
    reward: float
    success: float | None
    """Over the episodes of tags that report it; None: no tag does."""
    success_interval: tuple[float, float] | None
    """95 % confidence interval."""
    pass_at: dict[str, float]
    """Unbiased pass@k by `pass@K`, over whole groups; empty without success, and for groups of one."""
    turns: float
    tokens: float | None
    """Sampled ones of an episode."""
    truncated: float
    """Share of episodes that a token limit cut."""

    def to_json(self) -> dict[str, object]:
        tree = asdict(self)
        return {name: value for name, value in (tree | tree.pop("pass_at")).items() if value is not None}


def summarize(
    trajectories: Sequence[Trajectory], group_size: int, *, has_tokens: bool = True
) -> dict[str, EpisodeSummary]:
    """Return summaries by tag, that of all as the empty tag; none without episodes. trajectories: ordered by group."""
    if not trajectories:
        return {}
    tags = ["", *sorted({t.tag for t in trajectories})]
    members = {tag: [t for t in trajectories if tag in ("", t.tag)] for tag in tags}
    return {tag: _summarize(each, group_size, has_tokens) for tag, each in members.items()}


def to_json(summaries: Mapping[str, EpisodeSummary]) -> dict[str, object]:
    tags = {tag: summary.to_json() for tag, summary in summaries.items() if tag}
    return {"total": summaries[""].to_json(), "tags": tags} if summaries else {}


def describe(summaries: Mapping[str, EpisodeSummary]) -> Iterator[str]:
    """Yield lines: reward and success of all, then a line for each tag."""
    total = summaries[""]
    yield f"reward {total.reward:.4g}, mean of {total.episodes} episodes"
    if total.success is not None:
        low, high = total.success_interval or (0.0, 1.0)
        yield f"success {total.success:.4g}, 95 % confidence interval {low:.3f} to {high:.3f}"
        yield from (f"{name} {value:.4g}" for name, value in total.pass_at.items())
    for tag, summary in summaries.items():
        if tag:
            yield f"{tag}: {', '.join(_parts(summary))}"


def _parts(summary: EpisodeSummary) -> Iterator[str]:
    yield f"{summary.episodes} episodes"
    yield f"reward {summary.reward:.4g}"
    if summary.success is not None:
        yield f"success {summary.success:.4g}"
        yield from (f"{name} {value:.4g}" for name, value in summary.pass_at.items())
    yield f"{summary.turns:.3g} turns"
    if summary.tokens is not None:
        yield f"{summary.tokens:.4g} tokens"
    yield f"{summary.truncated:.0%} truncated"


def _summarize(trajectories: Sequence[Trajectory], group_size: int, has_tokens: bool) -> EpisodeSummary:
    count = len(trajectories)
    reporting = {t.tag for t in trajectories if read_success(t) is not None}
    reported = [t for t in trajectories if t.tag in reporting]
    groups = [[bool(read_success(t)) for t in members] for _, members in groupby(reported, key=lambda t: t.group_id)]
    tasks: dict[tuple[str, int], list[bool]] = {}  # a row comes again in more groups than a dataset has rows
    for each in reported:
        tasks.setdefault((each.tag, each.seed), []).append(bool(read_success(each)))
    whole = [group for group in groups if len(group) == group_size > 1]
    ks = sorted({*(1 << n for n in range(group_size.bit_length())), group_size})
    return EpisodeSummary(
        episodes=count,
        reward=sum(t.reward for t in trajectories) / count,
        success=sum(map(sum, groups)) / len(reported) if reported else None,
        success_interval=success_interval(list(tasks.values())) if reported else None,
        pass_at={f"pass@{k}": pass_at_k(whole, k) for k in ks} if whole else {},
        turns=sum(len(t.turns) for t in trajectories) / count,
        tokens=sum(t.num_sampled for t in trajectories) / count if has_tokens else None,
        truncated=sum(t.is_truncated for t in trajectories) / count,
    )


def success_interval(groups: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of the share of successes. groups: by task.

    Episodes of a task are alike: in place of their number it has that of independent ones with the same standard error,
    which is clustered by task (Miller 2024, arXiv:2411.00640), between the numbers of tasks and of episodes.
    """
    count = sum(map(len, groups))
    share = sum(map(sum, groups)) / count
    variance = sum((sum(group) - len(group) * share) ** 2 for group in groups) / count**2
    spread = share * (1 - share)
    independent = spread / variance if variance else (count if spread else len(groups))
    number = min(max(independent, len(groups)), count)
    shift = QUANTILE**2 / number
    center = (share + shift / 2) / (1 + shift)
    half = QUANTILE / (1 + shift) * math.sqrt(spread / number + shift / (4 * number))
    return max(0.0, center - half), min(1.0, center + half)
