"""Validation rows of a data pipeline, read once by rank 0."""

from collections.abc import Sequence

from offbeat.services.errors import ControlError, EpisodeError
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.run import LearnerRun


def read_validation(run: LearnerRun) -> list[Group]:
    """Return the validation rows as groups.

    Raises:
        ControlError: a row can't be read; names file and line.
    """
    config = run.config
    if config.data is None or config.data.val_dataset_name is None:
        return []
    try:
        source = DataSource(
            config.data, config.pipeline, run.model_folder, seed=config.seed, max_tokens=config.sequence_length
        )
        return [_group(number, members) for number, members in enumerate(source.validation())]
    except (EpisodeError, ValueError) as error:
        raise ControlError(f"data.val_dataset_name: {error}") from error


def _group(number: int, members: Sequence[Trajectory]) -> Group:
    first = members[0]
    return Group(
        entry_id="",
        group_id=first.group_id,
        number=number,
        tag=first.tag,
        seed=first.seed,
        admitted_version=0,
        trajectories=tuple(members),
    )
