"""Checks of the checkpoint to resume from and of the stores for new ones and for versions of weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec

from offbeat.deploy.config.checks.model import find_checkpoint
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_folder import holds_run
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.engines.group_layout import check_layout
from offbeat.trainer.training.checkpoint import LEARNER, MANIFEST, PREFIX

RESUME = "resume_from_checkpoint"


def check_resume(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a run, folder or URL that can't be resumed from, and URLs that can't be written to."""
    resume, store = config.resume_from_checkpoint, config.checkpoint_config
    if resume is True and not holds_run(config.output_dir):
        yield ConfigIssue(RESUME, f"there is no run in {config.output_dir} to resume: leave it out")
    if (isinstance(resume, Path) and (problem := _find_problem(resume))) or (
        problem := _find_optimizer_problem(config)
    ):
        yield ConfigIssue(RESUME, problem)
    if isinstance(resume, str) and (problem := _find_protocol_problem(resume)):
        yield ConfigIssue(RESUME, problem)
    if store and (problem := _find_protocol_problem(store.output_dir)):
        yield ConfigIssue("checkpoint_config.output_dir", problem)
    url = config.weights.url if config.weights.transport == "fs" else None
    if url is not None and (problem := _find_protocol_problem(url)):
        yield ConfigIssue("weights.url", problem)


def _find_problem(folder: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}; `true` takes the newest checkpoint of output_dir"
    missing = [name for name in (LEARNER, MANIFEST) if not (folder / name).is_file()]
    if not missing:
        return ""
    newest = _newest_below(folder)
    remedy = f"take its newest one, {newest}" if newest else "it holds none either"
    return f"{folder} is not a complete checkpoint ({' and '.join(missing)} missing): {remedy}"


def _find_optimizer_problem(config: RunConfig) -> str:
    """Return what keeps the engine from loading the optimizer's state; empty if nothing, or if it is not local."""
    checkpoint = find_checkpoint(config)
    if checkpoint is None or not (state := checkpoint / "state" / "policy").is_dir():
        return ""
    try:
        check_layout(state, config.actor_train.training_args)
    except RuntimeError as error:
        return str(error)
    return ""


def _newest_below(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run's folder, of its `checkpoints`, or of a folder of copies."""
    complete = [
        path.parent
        for level in ("", "*/")
        for path in folder.glob(f"{level}{PREFIX}*/{MANIFEST}")
        if (path.parent / LEARNER).is_file()
    ]
    return max(complete, key=_serial, default=None)


def _serial(checkpoint: Path) -> int:
    try:
        return int(json.loads((checkpoint / LEARNER).read_text())["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _find_protocol_problem(place: str) -> str:
    protocol, is_url, _ = place.partition("://")
    if not is_url:
        return ""
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        hint = " (pip install 'offbeat[s3]')" if protocol in ("s3", "s3a") else ""
        return f"{protocol}:// needs a package that is not installed{hint}: {error}"
    except ValueError:
        return f"fsspec knows no protocol {protocol!r}: take a folder, s3, gs, abfs, ..."
    return ""
