from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from offbeat.envs.dataset.files import open_rows
from offbeat.services.errors import ControlError
from offbeat.services.messages.types import Group
from offbeat.trainer.config.scored_roles import REFERENCE, ScoredRole, scored_roles
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.score_files import COMMAND, ScoreFiles, token_digest
from offbeat.trainer.training.score_keys import earlier_file_key, score_keys


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
        ControlError: rows have none.
    """
    roles = scored_roles(run.config, run.config.reference, "files")
    if not roles or dataset is None:
        return None
    keys, num_rows = score_keys(run), len(open_rows(dataset))
    opened: dict[str, ScoreFiles] = {}
    for role in roles:
        opened[keys[role.name]] = files = ScoreFiles(dataset, keys[role.name])
        if role.name == REFERENCE:
            continue  # written before the first step
        if missing := files.missing_files(num_rows):
            earlier = ScoreFiles(dataset, earlier_file_key(run, role))
            if not earlier.missing_files(num_rows):
                opened[keys[role.name]] = earlier
                continue
            count = sum(map(len, missing))
            raise ControlError(
                f"{files.folder} has no scores of {count} of {num_rows} rows by this model and these settings: run "
                f"`{COMMAND} CONFIG` first"
            )
    return FileScores({role: keys[role.name] for role in roles}, opened)
