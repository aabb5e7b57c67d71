"""Recorded trajectories with token outcomes."""

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from offbeat.deploy import run_folder
from offbeat.deploy.console.cached_file import CachedFile
from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.control.console.archive import NotRecordedError
from offbeat.services.control.console.schemas import (
    NO_OUTCOME,
    Floats,
    ImageView,
    MemberView,
    SegmentView,
    TrajectoryView,
    TurnView,
)
from offbeat.services.control.schemas import finite
from offbeat.services.errors import CodecError, RolloutError
from offbeat.services.messages.types import Segment, Trajectory
from offbeat.trainer.data.token_outcome import TokenOutcome
from offbeat.trainer.training.recorded_steps import RecordedSteps, TrajectoryTokens

OUTCOMES = [outcome.name.lower() for outcome in TokenOutcome]
LEFT_OUT = (
    "no tokens are kept of it: of groups left out by variance_filter_ratio, of steps beyond console.keep_steps, and of "
    "pipelines of rows or pairs"
)
NO_TOKENIZER = "tokens are numbers without text: the policy's tokenizer is not in {folder} on this host"
MAX_CACHED_STEPS = 64
"""Whose tokens are kept in memory."""


class RecordedTrajectories:
    def __init__(self, folder: Path, model_folder: Callable[[], Path]) -> None:
        self._log = RecordedSteps(folder)
        self._model_folder = model_folder
        self._tokenizer = CachedFile(folder / run_folder.CONFIG, self._load_tokenizer)
        self._tokens: dict[int, CachedFile[list[TrajectoryTokens]]] = {}
        """The last one used last."""
        self._ratios: dict[int, CachedFile[dict[int, float]]] = {}
        """By step: largest ratios of its groups."""
        self.steps: frozenset[int] = frozenset()

    def refresh(self) -> None:
        self.steps = frozenset(self._log.steps())
        for step in self._tokens.keys() - self.steps:
            del self._tokens[step]
        for step in self._ratios.keys() - self.steps:
            del self._ratios[step]

    def max_ratios(self) -> dict[int, float]:
        """Return groups' largest ratios, without those of steps whose file can't be read."""
        ratios: dict[int, float] = {}
        for step in sorted(self.steps):
            if step not in self._ratios:
                self._ratios[step] = CachedFile(self._log.tokens_path(step), partial(self._read_ratios, step))
            with suppress(CodecError):
                ratios |= self._ratios[step].get()
        return ratios

    def _read_ratios(self, step: int) -> dict[int, float]:
        ratios: dict[int, float] = {}
        for tokens in self._log.read_tokens(step):
            if (ratio := tokens.max_ratio) == ratio:
                ratios[tokens.group] = max(ratio, ratios.get(tokens.group, ratio))
        return ratios

    def members(self, step: int, number: int) -> list[MemberView]:
        tokens_of = {tokens.index: tokens for tokens in self._of_step(step) if tokens.group == number}
        return [_member(trajectory, tokens_of.get(trajectory.index)) for trajectory in self._read(step, number)]

    def view(self, step: int, number: int, index: int) -> TrajectoryView:
        """Raises `NotRecordedError`."""
        trajectory = self._find(step, number, index)
        tokens = next((each for each in self._of_step(step) if (each.group, each.index) == (number, index)), None)
        return TrajectoryView(
            group=number,
            index=index,
            tag=trajectory.tag,
            seed=trajectory.seed,
            attempt=trajectory.attempt,
            step=step,
            reward=finite(trajectory.reward),
            stop_reason=trajectory.stop_reason,
            error=trajectory.error,
            duration_s=trajectory.duration_s,
            worker=trajectory.worker_id,
            metrics={name: finite(value) for name, value in trajectory.metrics.items()},
            reason="; ".join([*([LEFT_OUT] if tokens is None else []), *self._missing_tokenizer()]),
            turns=self._turns(trajectory),
            text=self._text(trajectory),
            segments=_segments(trajectory, tokens),
            pieces=self._pieces(trajectory),
            outcomes=OUTCOMES,
        )

    def episode(self, step: int, number: int, index: int) -> tuple[Trajectory, list[str]]:
        """Return a trajectory and its answers without special tokens; raises `NotRecordedError`."""
        trajectory = self._find(step, number, index)
        if trajectory.text:
            return trajectory, list(trajectory.text[2::2])
        for reason in self._missing_tokenizer():
            raise NotRecordedError(reason)
        spans = [trajectory.segments[turn.segment].tokens[turn.start : turn.end].tolist() for turn in trajectory.turns]
        return trajectory, [self._decode(span, skip_special_tokens=True) for span in spans]

    def _find(self, step: int, number: int, index: int) -> Trajectory:
        trajectories = self._read(step, number)
        trajectory = next((each for each in trajectories if each.index == index), None)
        if trajectory is None:
            have = ", ".join(str(each.index) for each in trajectories) or "none"
            raise NotRecordedError(
                f"group {number} has no trajectory {index} in the batch of step {step}: it has {have}"
            )
        return trajectory

    def _of_step(self, step: int) -> list[TrajectoryTokens]:
        file = self._tokens.pop(step, None) or CachedFile(
            self._log.tokens_path(step), partial(self._log.read_tokens, step)
        )
        self._tokens[step] = file
        if len(self._tokens) > MAX_CACHED_STEPS:
            del self._tokens[next(iter(self._tokens))]
        try:
            return file.get()
        except CodecError as error:
            raise NotRecordedError(str(error)) from error

    def _read(self, step: int, number: int) -> Sequence[Trajectory]:
        try:
            return self._log.read_members(step, number)
        except CodecError as error:
            raise NotRecordedError(str(error)) from error

    def _load_tokenizer(self) -> Any:
        """Return the policy's tokenizer, if on this host."""
        file = self._model_folder() / "tokenizer.json"
        try:
            # The import of transformers, for the other kinds, takes seconds
            return Tokenizer.from_file(str(file)) if file.is_file() else load_tokenizer(file.parent)
        except RolloutError:
            return None

    def _missing_tokenizer(self) -> list[str]:
        return [] if self._tokenizer.get() else [NO_TOKENIZER.format(folder=self._model_folder())]

    def _decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        tokenizer = self._tokenizer.get()
        if tokenizer is None:
            return ""
        return tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def _decode_context(self, segment: Segment, start: int, end: int) -> str:
        """Decode a segment's tokens `[start, end)`, one for each image."""
        hidden = {i for image in segment.images for i in range(image.start + 1, image.start + image.count)}
        tokens = enumerate(segment.tokens[start:end].tolist(), start)
        return self._decode([token for i, token in tokens if i not in hidden])

    def _turns(self, trajectory: Trajectory) -> list[TurnView]:
        recorded = trajectory.text[1::2]
        if not recorded:
            recorded = ("",)  # the first prompt is in `TrajectoryView.text`
        elif len(recorded) != len(trajectory.turns):
            recorded = ()  # of the env's steps, between which an agent called the policy as it liked
        views: list[TurnView] = []
        ends = [0] * len(trajectory.segments)
        for i, turn in enumerate(trajectory.turns):
            segment, observed = trajectory.segments[turn.segment], (ends[turn.segment], turn.start)
            ends[turn.segment] = turn.end
            view = TurnView(
                segment=turn.segment,
                start=turn.start,
                end=turn.end,
                reward=finite(turn.reward),
                is_truncated=turn.is_truncated,
                observation=recorded[i] if i < len(recorded) else self._decode_context(segment, *observed),
                text=self._decode(segment.tokens[turn.start : turn.end].tolist()),
            )
            views.append(view)
        return views

    def _text(self, trajectory: Trajectory) -> list[str]:
        if len(trajectory.text) > 1 or not trajectory.segments:
            return list(trajectory.text)
        first = trajectory.segments[0]
        return [self._decode_context(first, 0, trajectory.turns[0].start if trajectory.turns else len(first.tokens))]

    def _pieces(self, trajectory: Trajectory) -> dict[str, str]:
        if self._missing_tokenizer():
            return {}
        distinct = sorted({int(token) for segment in trajectory.segments for token in segment.tokens})
        return {str(token): self._decode([token]) for token in distinct}


def _member(trajectory: Trajectory, tokens: TrajectoryTokens | None) -> MemberView:
    versions = trajectory.version_range()
    counts = Counter() if tokens is None else Counter(tokens.outcome.tolist())
    return MemberView(
        index=trajectory.index,
        reward=finite(trajectory.reward),
        turns=len(trajectory.turns),
        num_sampled=trajectory.num_sampled,
        stop_reason=trajectory.stop_reason,
        oldest_version=versions[0] if versions else None,
        newest_version=versions[1] if versions else None,
        max_ratio=None if tokens is None else finite(tokens.max_ratio),
        outcomes={OUTCOMES[outcome]: count for outcome, count in sorted(counts.items())},
    )


def _segments(trajectory: Trajectory, tokens: TrajectoryTokens | None) -> list[SegmentView]:
    places = _sampled_places(trajectory)
    return [_segment(i, segment, places, tokens) for i, segment in enumerate(trajectory.segments)]


def _sampled_places(trajectory: Trajectory) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return each turn's segment and sampled tokens, in the order of `TrajectoryTokens`: seat by seat."""
    seats = trajectory.seats or ("",) * len(trajectory.turns)
    turns = [turn for _, turn in sorted(zip(seats, trajectory.turns, strict=True), key=lambda each: each[0])]
    return [
        (turn.segment, turn.start + np.flatnonzero(trajectory.segments[turn.segment].loss_mask[turn.start : turn.end]))
        for turn in turns
    ]


def _segment(
    number: int,
    segment: Segment,
    places: Sequence[tuple[int, npt.NDArray[np.int64]]],
    tokens: TrajectoryTokens | None,
) -> SegmentView:
    length = len(segment.tokens)
    columns = [np.full(length, np.nan) for _ in range(3)]
    outcome = np.full(length, NO_OUTCOME, dtype=np.uint8)
    start = 0
    for owner, positions in places if tokens is not None else ():
        end = start + len(positions)
        if owner == number and tokens is not None:
            for column, values in zip(columns, (tokens.logprobs, tokens.ratio, tokens.advantages), strict=True):
                column[positions] = values[start:end]
            outcome[positions] = tokens.outcome[start:end]
        start = end
    return SegmentView(
        tokens=segment.tokens.tolist(),
        mask=segment.loss_mask.astype(np.uint8).tolist(),
        versions=segment.token_versions().tolist(),
        logprobs=_nullable(np.where(segment.loss_mask, segment.logprobs, np.nan)),
        trainer_logprobs=_nullable(columns[0]),
        ratio=_nullable(columns[1]),
        advantages=_nullable(columns[2]),
        outcome=outcome.tolist(),
        images=[
            ImageView(start=image.start, count=image.count, png=base64.b64encode(image.png).decode())
            for image in segment.images
        ],
    )


def _nullable(values: npt.NDArray[np.floating[Any]]) -> Floats:
    return [finite(value) for value in values.tolist()]
