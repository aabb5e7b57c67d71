"""Validation rows of a data pipeline, read by rank 0."""

from collections.abc import Mapping
from types import MappingProxyType

from offbeat.services.errors import ControlError
from offbeat.services.messages.types import Group
from offbeat.services.rollout.data.prompts import count_validation
from offbeat.services.rollout.data.source import BAD_ROW, TOO_LONG, DataSource
from offbeat.services.telemetry import Partial
from offbeat.trainer.learner.file_scores import FileScores, open_file_scores
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.prepare_scores import row_group
from offbeat.trainer.training.trainer import Trainer

NAMES = {BAD_ROW: "rows_bad", TOO_LONG: "rows_too_long"}
"""Metrics of rows that are left out."""


class ValidationRows:
    def __init__(
        self,
        groups: list[Group],
        files: FileScores | None = None,
        left_out: Mapping[str, Partial] = MappingProxyType({}),
    ) -> None:
        """left_out: metrics of the rows that are in no group."""
        self._groups = groups
        self._files = files
        self.left_out = left_out

    def __len__(self) -> int:
        return len(self._groups)

    def evaluate(self, trainer: Trainer) -> Mapping[str, Partial]:
        """Return the losses, and the numbers of rows left out; raises ControlError."""
        return {**trainer.evaluate(self.groups()), **self.left_out}

    def groups(self) -> list[Group]:
        """Return the groups with their scores; raises ControlError."""
        files = self._files
        return self._groups if files is None else [files.attach(group) for group in self._groups]


def count_prompts(run: LearnerRun) -> int | None:
    """Return the number of prompts for validation; None for episodes of envs.

    Raises:
        ControlError: they can't be read.
    """
    config = run.config
    if not config.plays_prompts or config.data is None:
        return None
    try:
        return count_validation(config.data, config.val_env_manager.tags_of(config.custom_envs))
    except ValueError as error:
        raise ControlError(f"data.val_dataset_name: {error}") from error


def read_validation(run: LearnerRun) -> ValidationRows:
    """Read the rows.

    Raises:
        ControlError: the file can't be read, or has no usable row.
    """
    config = run.config
    if config.data is None or config.data.val_dataset_name is None or not config.reads_data:
        return ValidationRows([])
    try:
        source = DataSource(
            config.data, config.pipeline, run.model_folder, seed=config.seed, max_tokens=config.sequence_length
        )
        validation = source.validation()
    except ValueError as error:
        raise ControlError(f"data.val_dataset_name: {error}") from error
    if not validation.groups:
        reasons = ", ".join(f"{count} {NAMES[reason]}" for reason, count in validation.left_out.items())
        raise ControlError(
            f"data.val_dataset_name: no row can be evaluated ({reasons}): mend the file, or leave it out"
        )
    groups = [row_group(number, members) for number, members in enumerate(validation.groups)]
    left_out = {NAMES[reason]: Partial("sum", float(count)) for reason, count in validation.left_out.items()}
    return ValidationRows(groups, open_file_scores(run, config.data.val_dataset_name), left_out)
