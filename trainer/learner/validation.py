"""Validation rows of a data pipeline, read by rank 0."""

from offbeat.services.errors import ControlError, EpisodeError
from offbeat.services.messages.types import Group
from offbeat.services.rollout.data.prompts import count_validation
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.learner.file_scores import FileScores, open_file_scores
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.prepare_scores import row_group


class ValidationRows:
    def __init__(self, groups: list[Group], files: FileScores | None = None) -> None:
        self._groups = groups
        self._files = files

    def __len__(self) -> int:
        return len(self._groups)

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
        ControlError: a row can't be read; names file and line.
    """
    config = run.config
    if config.data is None or config.data.val_dataset_name is None or not config.reads_data:
        return ValidationRows([])
    try:
        source = DataSource(
            config.data, config.pipeline, run.model_folder, seed=config.seed, max_tokens=config.sequence_length
        )
        groups = [row_group(number, members) for number, members in enumerate(source.validation())]
    except (EpisodeError, ValueError) as error:
        raise ControlError(f"data.val_dataset_name: {error}") from error
    return ValidationRows(groups, open_file_scores(run, config.data.val_dataset_name))
