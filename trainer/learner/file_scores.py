from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from offbeat.services.errors import ControlError
from offbeat.services.messages.types import Group
from offbeat.trainer.config.scored_roles import REFERENCE, ScoredRole, scored_roles
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.prepare_scores import open_source
from offbeat.trainer.training.score_files import COMMAND, ScoreFiles, token_digest
from offbeat.trainer.training.score_keys import earlier_file_keys, score_keys


class FileScores:
    def __init__(self, roles: Mapping[ScoredRole, str], files: Mapping[str, ScoreFiles]) -> None:
        """roles: role -> key of its scores. files: by key."""
        self._roles, self._files = roles, files

    def attach(self, group: Group) -> Group:
        keys = [key for role, key in self._roles.items() if role.scores(group.tag) and key not in group.scores]
        if not keys:
            return group
        row, digest = group.trajectories[0].seed, token_digest(group)
        return replace(group, scores={**group.scores, **{key: self._files[key].read(row, digest) for key in keys}})


def open_file_scores(run: LearnerRun, dataset: Path | None) -> FileScores | None:
    """Open the scores, or those of an earlier build; None if no role has files.

    Raises:
        ControlError: rows have none, or have changed since.
    """
    data = run.config.data
    roles = scored_roles(run.config, run.config.reference, "files")
    if not roles or dataset is None or data is None:
        return None
    keys = score_keys(run)
    try:
        source = open_source(run, data, dataset, run.model_folder)
    except ValueError as error:
        raise ControlError(f"{dataset}: {error}") from error
    opened: dict[str, ScoreFiles] = {}
    for role in roles:
        opened[keys[role.name]] = files = ScoreFiles(dataset, keys[role.name])
        if role.name == REFERENCE:
            continue  # written before the first step
        if missing := files.missing_files(source):
            earlier = [ScoreFiles(dataset, key) for key in earlier_file_keys(run, role)]
            if complete := [each for each in earlier if not each.missing_files(source)]:
                opened[keys[role.name]] = complete[0]
                continue
            count = sum(map(len, missing))
            raise ControlError(
                f"{files.folder} has no scores of {count} of {source.num_rows} rows, as they are now, by this model and "
                f"these settings: run `{COMMAND} CONFIG` first"
            )
    return FileScores({role: keys[role.name] for role in roles}, opened)
