"""Scores of a step's groups, from the services of frozen models.

Invariant: a group is trained with all its scores or dropped with a reason.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from offbeat.services.buffer.scores import GroupLostError, GroupScores, ScoreRefusedError
from offbeat.services.messages.types import Group
from offbeat.trainer.config.scored_roles import ScoredRole

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Maximum stop delay."""
LOST, UNSCORABLE = "lost", "unscorable"

Report = Callable[[int, Group | None], None]
"""Receives the step and the group whose scores are awaited, then None."""


class ScoreIntake:
    def __init__(self, scores: GroupScores, roles: Mapping[ScoredRole, str], report: Report = lambda *_: None) -> None:
        """roles: role -> key of its scores."""
        self._scores = scores
        self._roles = roles
        self._report = report

    def has_scores(self, group: Group) -> bool:
        return all(key in group.scores for key in self._keys(group))

    def attach(self, group: Group, step: int, should_stop: Callable[[], bool]) -> Group | str | None:
        """Return the group with its scores, the reason to drop it, or None if stopped."""
        keys = self._keys(group)
        if not keys or self.has_scores(group):
            return group
        is_reported = False
        try:
            while (scores := self._scores.wait(group.number, keys, POLL_S if is_reported else 0.0)) is None:
                if should_stop():
                    return None
                if not is_reported:
                    self._report(step, group)
                    is_reported = True
        except (ScoreRefusedError, GroupLostError) as error:
            logger.error("group %d dropped: %s", group.number, error)
            return LOST if isinstance(error, GroupLostError) else UNSCORABLE
        finally:
            if is_reported:
                self._report(step, None)
        return replace(group, scores={**group.scores, **scores})

    def _keys(self, group: Group) -> list[str]:
        return [key for role, key in self._roles.items() if role.scores(group.tag)]
