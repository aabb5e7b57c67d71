"""Profiles of steps by PyTorch: a timeline, and CUDA's allocations."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.run import LearnerRun

logger = logging.getLogger(__name__)

PROFILER = "profiler"
"""Folder in a run's."""
MAX_MEMORY_EVENTS = 100_000
"""Newest allocations kept of a step, as in ROLL."""


@contextmanager
def profile_step(run: LearnerRun, ranks: Ranks, step: int) -> Iterator[None]:
    """Profile this rank's part of a step that is listed in `profiler_steps`.

    Writes `step-NUMBER-rank-RANK.json.gz`, for Perfetto or `chrome://tracing`, and `.pickle`, for
    https://pytorch.org/memory_viz. A profile that can't be written is left out, with a warning.
    """
    config = run.config
    if step not in config.profiler_steps or not (config.profiler_timeline or config.profiler_memory):
        yield
        return
    rank = ranks.rank if ranks.world is None else ranks.world.rank
    path = run.output_dir / PROFILER / f"step-{step:06d}-rank-{rank}"
    with ExitStack() as stack:
        if config.profiler_timeline:
            stack.enter_context(_timeline(path.with_suffix(".json.gz"), ranks.device))
        if config.profiler_memory:
            stack.enter_context(_memory(path.with_suffix(".pickle")))
        yield


@contextmanager
def _timeline(path: Path, device: torch.device) -> Iterator[None]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, with_stack=True) as profiler:
        yield
    _write(path, profiler.export_chrome_trace)


@contextmanager
def _memory(path: Path) -> Iterator[None]:
    torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS, stacks="python")
    try:
        yield
        _write(path, torch.cuda.memory._dump_snapshot)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _write(path: Path, write: Callable[[str], object]) -> None:
    """Write a profile, or log why it can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(path))
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            path.unlink()
        logger.warning("no profile of this step: %s: %s", path, error)
    else:
        logger.info("profile of this step: %s", path)
