"""Tracing interface of env workers and learner; without an endpoint it records nothing."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from offbeat.services.messages.types import Completion, EpisodeTask, Group, Sampling, Trajectory

RecordCompletion = Callable[[Completion], None]


class EpisodeSpans(Protocol):
    @property
    def traceparent(self) -> str:
        """W3C's header of the episode's span; empty if untraced."""
        ...

    def chat(self, prompt: Sequence[int], max_new_tokens: int) -> AbstractContextManager[RecordCompletion]:
        """Enclose the sampling of a turn."""
        ...

    def reset(self) -> AbstractContextManager[None]: ...

    def step(self) -> AbstractContextManager[None]:
        """Enclose an env's step."""
        ...

    def finish(self, trajectory: Trajectory) -> None: ...


class EpisodeTracer(Protocol):
    def episode(
        self, task: EpisodeTask, tag: str, sampling: Sampling, *, has_tools: bool
    ) -> AbstractContextManager[EpisodeSpans]:
        """Enclose an episode. has_tools: its env has functions for the policy."""
        ...

    def close(self) -> None:
        """Send the remaining spans, within seconds."""
        ...


class StepTracer(Protocol):
    def train(self, step: int, groups: Sequence[Group]) -> AbstractContextManager[None]:
        """Enclose a step (0-based) on `groups`."""
        ...

    def sync(self, version: int) -> AbstractContextManager[None]:
        """Enclose the publication of a version."""
        ...

    def close(self) -> None:
        """Send the remaining spans, within seconds."""
        ...


class NoSpans:
    traceparent = ""

    def chat(self, prompt: Sequence[int], max_new_tokens: int) -> AbstractContextManager[RecordCompletion]:
        del prompt, max_new_tokens
        return contextlib.nullcontext(_ignore)

    def reset(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, trajectory: Trajectory) -> None:
        del trajectory


NO_SPANS = NoSpans()


class NoEpisodeTracer:
    def episode(
        self, task: EpisodeTask, tag: str, sampling: Sampling, *, has_tools: bool
    ) -> AbstractContextManager[EpisodeSpans]:
        del task, tag, sampling, has_tools
        return contextlib.nullcontext(NO_SPANS)

    def close(self) -> None:
        return None


class NoStepTracer:
    def train(self, step: int, groups: Sequence[Group]) -> AbstractContextManager[None]:
        del step, groups
        return contextlib.nullcontext()

    def sync(self, version: int) -> AbstractContextManager[None]:
        del version
        return contextlib.nullcontext()

    def close(self) -> None:
        return None


def _ignore(_: Completion) -> None:
    return None
