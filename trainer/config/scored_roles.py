"""Frozen models in services of their own, or with scores in files."""

from dataclasses import dataclass
from typing import Literal

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.roles import ReferenceConfig, TeacherConfig

Placement = Literal["service", "files"]
REFERENCE = "reference"
TEACHER_PREFIX = "teacher."


@dataclass(frozen=True, slots=True)
class ScoredRole:
    name: str
    """`reference` or `teacher.NAME`."""
    config: ReferenceConfig | TeacherConfig

    @property
    def num_replicas(self) -> int:
        return self.config.strategy_args.num_replicas

    @property
    def starts_from_policy(self) -> bool:
        """Return whether its weights are the policy's first."""
        return self.config.model_args.model_name_or_path is None

    def scores(self, tag: str) -> bool:
        """Return whether groups of `tag` need its score."""
        return not isinstance(self.config, TeacherConfig) or self.config.teaches(tag)


def scored_roles(
    config: AlgorithmConfig, reference: ReferenceConfig, placement: Placement = "service"
) -> list[ScoredRole]:
    """Return the roles scored outside the learner."""
    teachers = config.teacher if config.distills else {}
    roles = {f"{TEACHER_PREFIX}{name}": teacher for name, teacher in teachers.items()}
    own = {REFERENCE: reference} if config.needs_ref_logprobs else {}
    return [
        ScoredRole(name, role) for name, role in {**own, **roles}.items() if role.strategy_args.placement == placement
    ]
