import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from offbeat.envs.dataset.files import DatasetRows, Row, RowError, read_field
from offbeat.envs.dataset.prompt import PromptError, read_prompt
from offbeat.services.chat.assistant_tokens import ConversationError
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import make_scorer
from offbeat.services.reward.sample import GroupSample, RewardSample, as_member
from offbeat.services.reward.scorer import RewardScorer
from offbeat.services.rollout.data.images import read_images

SCORE = "score"
"""Name of the combination."""


@dataclass(frozen=True, slots=True)
class Columns:
    response: str = "response"
    label: str = "label"
    ground_truth: str = "ground_truth"
    messages: str = "messages"
    prompt: str = "prompt"
    images: str = "images"
    tag: str = "tag"
    group: str = "group"
    """Of rows to compare with each other; without it those of equal prompts."""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Value of the tag's column -> tag of the rewards; others are unchanged."""
    default_tag: str = ""
    """Tag of rows without one."""
    only_tag: str = ""
    """Tag of all rows, whatever their column says."""


@dataclass(slots=True)
class ScoredRow:
    name: str
    """File and line."""
    label: float | None
    values: dict[str, float] = field(default_factory=dict[str, float])
    """By reward, and `score`."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    """Reason and message."""
    reason: str = ""
    sample: RewardSample | None = None
    group: str = ""
    """What rows to compare with each other have in common."""

    def fail(self, error: RewardError) -> None:
        self.failure, self.reason = str(error), error.reason


@dataclass(frozen=True, slots=True)
class Agreement:
    """A reward's values, and their agreement with the labels, both cut at the threshold."""

    name: str
    num_scored: int
    mean: float
    std: float
    seconds_mean: float
    seconds_max: float
    num_labelled: int = 0
    agreement: float | None = None
    """Share of labelled rows."""
    false_positives: int = 0
    false_negatives: int = 0
    rank_correlation: float | None = None
    """Spearman's; None if all values or all labels are equal."""


@dataclass(frozen=True, slots=True)
class RewardReport:
    rows: tuple[ScoredRow, ...]
    agreements: tuple[Agreement, ...]
    failures: Mapping[str, int]
    """By reason."""
    disagreements: tuple[str, ...]
    """Rows whose score and label differ."""
    seconds: float

    def slowest(self, count: int) -> list[tuple[float, str, str]]:
        """Return seconds, row and reward."""
        times = [(seconds, row.name, name) for row in self.rows for name, seconds in row.seconds.items()]
        return sorted(times, reverse=True)[:count]

    def to_json(self, num_slowest: int) -> dict[str, Any]:
        slowest = [{"row": row, "reward": name, "seconds": s} for s, row, name in self.slowest(num_slowest)]
        return {
            "rewards": [asdict(each) for each in self.agreements],
            "failures": dict(self.failures),
            "failed_rows": [{"row": row.name, "failure": row.failure} for row in self.rows if row.failure],
            "disagreements": list(self.disagreements),
            "slowest": slowest,
            "seconds": self.seconds,
        }


async def check_rewards(
    config: RewardsConfig, rows: DatasetRows, columns: Columns, *, threshold: float, limit: int | None = None
) -> RewardReport:
    """Score the rows in this process; raises ValueError if a reward can't be built."""
    began = time.monotonic()
    scorer = make_scorer(config, local=True)
    try:
        places = {reward.name: asyncio.Semaphore(reward.max_concurrent) for reward in config.rewards}
        indices = range(len(rows) if limit is None else min(limit, len(rows)))
        scored = await asyncio.gather(*(_score_row(scorer, places, rows, index, columns) for index in indices))
        await _compare_groups(scorer, scored)
        for row in scored:
            if not row.failure:
                row.values[SCORE] = scorer.combine(row.values)
    finally:
        await scorer.close()
    failures = Counter(row.reason for row in scored if row.reason)
    names = [*(reward.name for reward in config.rewards), SCORE]
    agreements = [_agree(name, scored, threshold) for name in names]
    disagreements = [row.name for row in scored if _disagrees(row, SCORE, threshold)]
    return RewardReport(tuple(scored), tuple(agreements), failures, tuple(disagreements), time.monotonic() - began)


async def _score_row(
    scorer: RewardScorer, places: Mapping[str, asyncio.Semaphore], rows: DatasetRows, index: int, columns: Columns
) -> ScoredRow:
    row = ScoredRow(rows.name(index), None)
    try:
        content = rows[index]
        row.label = _label(content, columns)
        row.sample = sample = read_sample(content, columns, rows.folder)
        row.group = _group(content, sample, columns)
    except RowError as error:
        row.failure, row.reason = str(error), "bad_row"
        return row
    names = scorer.names(sample.tag)
    results = await asyncio.gather(*(_score_one(scorer, places[name], name, sample, row) for name in names))
    if errors := [error for error in results if error is not None]:
        row.fail(errors[0])
    elif not names and not scorer.group_names(sample.tag):
        row.failure, row.reason = f"no reward scores tag {sample.tag!r}", "no_reward"
    return row


async def _compare_groups(scorer: RewardScorer, rows: Sequence[ScoredRow]) -> None:
    """Add the rewards that compare rows of a group, or fail these."""
    groups: dict[tuple[str, str], list[tuple[ScoredRow, RewardSample]]] = {}
    for row in rows:
        if row.sample is not None and not row.failure and scorer.group_names(row.sample.tag):
            groups.setdefault((row.sample.tag, row.group), []).append((row, row.sample))
    await asyncio.gather(*(_compare(scorer, members, number) for number, members in enumerate(groups.values())))


async def _compare(scorer: RewardScorer, members: Sequence[tuple[ScoredRow, RewardSample]], number: int) -> None:
    rows = [row for row, _ in members]
    sample = GroupSample([as_member(sample, row.values, 0.0) for row, sample in members], number)
    if len(rows) == 1:
        alone = "no other row has its prompt, or its value of the column `group`, to be compared with"
        rows[0].fail(RewardError(Failure.BAD_ROW, alone))
        return
    for name in scorer.group_names(sample.members[0].tag):
        began = time.monotonic()
        try:
            values = await scorer.compare(name, sample)
        except RewardError as error:
            for row in rows:
                row.fail(error)
            return
        finally:
            rows[0].seconds[name] = time.monotonic() - began  # of the group
        for row, value in zip(rows, values, strict=True):
            row.values[name] = value


def _group(content: Row, sample: RewardSample, columns: Columns) -> str:
    value = content.get(columns.group)
    return json.dumps(sample.prompt, sort_keys=True, default=str) if value is None else str(value)


async def _score_one(
    scorer: RewardScorer, place: asyncio.Semaphore, name: str, sample: RewardSample, row: ScoredRow
) -> RewardError | None:
    async with place:  # so that the time is the call's alone
        began = time.monotonic()
        try:
            row.values[name] = await scorer.score_one(name, sample)
        except RewardError as error:
            return error
        finally:
            row.seconds[name] = time.monotonic() - began
    return None


def read_sample(row: Row, columns: Columns, folder: Path) -> RewardSample:
    """Read a row as a run does. folder: of images. Raises RowError without a response, or with an invalid prompt."""
    response = row.get(columns.response)
    if not isinstance(response, str):
        raise RowError(f"the column {columns.response!r} has no text")
    c = columns
    used = (c.response, c.label, c.ground_truth, c.messages, c.prompt, c.images, c.tag)
    rest = {key: value for key, value in row.items() if key not in used}
    tag = c.only_tag or str(row.get(c.tag) or c.default_tag)
    prompt = _read_prompt(row, columns, folder)
    return RewardSample(prompt, response, 0, read_field(row, c.ground_truth), c.tags.get(tag, tag), rest)


def _read_prompt(row: Row, columns: Columns, folder: Path) -> list[dict[str, Any]]:
    """Return a row's messages, with their images; none without a prompt."""
    if row.get(columns.messages) is None and row.get(columns.prompt) is None:
        return []
    try:
        prompt = read_prompt(row, columns.messages, columns.prompt, columns.images)
        return prompt._replace(images=read_images(row.get(columns.images), folder)).messages()
    except (PromptError, ConversationError) as error:
        raise RowError(str(error)) from error


def _label(row: Row, columns: Columns) -> float | None:
    value = row.get(columns.label)
    if value is None:
        return None
    try:
        label = float(value)
    except (TypeError, ValueError):
        raise RowError(f"the column {columns.label!r} has {value!r}, which is no number") from None
    if not np.isfinite(label):
        raise RowError(f"the column {columns.label!r} has {value!r}, which is no finite number")
    return label


def _agree(name: str, rows: Sequence[ScoredRow], threshold: float) -> Agreement:
    scored = [row for row in rows if name in row.values]
    values = np.array([row.values[name] for row in scored])
    timed = [row.seconds for row in rows if (row.seconds if name == SCORE else name in row.seconds)]
    seconds = [sum(times.values()) if name == SCORE else times[name] for times in timed]
    labelled = [row for row in scored if row.label is not None]
    basics = {
        "name": name,
        "num_scored": len(scored),
        "mean": float(values.mean()) if scored else 0.0,
        "std": float(values.std()) if scored else 0.0,
        "seconds_mean": float(np.mean(seconds)) if seconds else 0.0,
        "seconds_max": max(seconds, default=0.0),
    }
    if not labelled:
        return Agreement(**basics)
    positives = np.array([row.values[name] >= threshold for row in labelled])
    labels = np.array([cast(float, row.label) for row in labelled])
    wanted = labels >= threshold
    return Agreement(
        **basics,
        num_labelled=len(labelled),
        agreement=float((positives == wanted).mean()),
        false_positives=int((positives & ~wanted).sum()),
        false_negatives=int((~positives & wanted).sum()),
        rank_correlation=rank_correlation(np.array([row.values[name] for row in labelled]), labels),
    )


def _disagrees(row: ScoredRow, name: str, threshold: float) -> bool:
    return row.label is not None and name in row.values and (row.values[name] >= threshold) != (row.label >= threshold)


def rank_correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float | None:
    """Return Spearman's rho, equal values with their mean rank, if defined."""
    ranks = [_ranks(values) for values in (one, other)]
    if any(rank.std() == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - (counts - 1) / 2)[inverse]).astype(np.float64)
