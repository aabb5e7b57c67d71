"""Pairs of keys: a setting, and the change of another key, which must have an effect or be refused."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from pydantic import ValidationError

from offbeat.services.messages.types import Group
from offbeat.trainer.checks.algorithm import check_algorithm, check_vtrace_weight
from offbeat.trainer.checks.effects import check_effects
from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.selection import carries_signal
from tests.copying import replace
from tests.trainer.config.key_effects import EFFECTS, GAE, KL_LOSS, KL_REWARD, NESTED
from tests.trainer.outcome import outcome, rich_groups

TAGS = ("tag0", "tag1")
ELSEWHERE = ("sequence_length",)
"""Keys with another effect than on a batch."""
NARROWER = ({"advantage_clip", "reward_clip"},)
"""Two bounds on one quantity, of which the narrower decides."""
OF_RETURNS = ("reinforce", "grpo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that differ in their defaults alone."""
ENDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gamma", GAE, {"gamma": 0.0}),
    ("gamma", {"adv_estimator": "reinforce"}, {"gamma": 0.0}),
    ("gamma", {"adv_estimator": "agentic_reinforce"}, {"gamma": 0.0}),
    ("lambd", GAE, {"lambd": 0.0}),
    ("lambd", GAE, {"lambd": 1.0}),
    ("step_reward_gamma", {"adv_estimator": "step_reinforce"}, {"step_reward_gamma": 0.0}),
    ("step_reward_gamma", {"adv_estimator": "gigpo"}, {"step_reward_gamma": 0.0}),
    ("episode_reward_weight", {"adv_estimator": "gigpo"}, {"episode_reward_weight": 0.0}),
    ("step_reward_weight", {"adv_estimator": "gigpo"}, {"step_reward_weight": 0.0}),
    ("topr_positive_weight", {"pg_variant": "topr"}, {"topr_positive_weight": 0.0}),
    ("topr_negative_weight", {"pg_variant": "topr"}, {"topr_negative_weight": 0.0}),
    ("variance_filter_ratio", {}, {"variance_filter_ratio": 0.3}),
    ("sequence_length", {}, {"sequence_length": 8}),
    ("entropy_loss_coef", {}, {"entropy_loss_coef": 10.0}),
    ("kl_loss_coef", KL_LOSS, {"kl_loss_coef": 10.0}),
    ("init_kl_coef", KL_REWARD, {"init_kl_coef": 10.0}),
]
"""Ends of ranges, beside which other keys may lose their effect."""
SETTINGS = [*ENDS, *((key, *change) for key, changes in (EFFECTS | NESTED).items() for change in changes)]
THRESHOLD = {"error_max_len_threshold": 4}
"""Instead of one that leaves no negative reward."""
ONE_STEP, TWO_STEPS = {"ppo_epochs": 1}, {"ppo_epochs": 2}


@dataclass(frozen=True)
class Pair:
    """A configuration, and the same with another key changed."""

    keys: tuple[str, str]
    before: dict[str, Any]
    after: dict[str, Any]

    def __str__(self) -> str:
        changed = {name: value for name, value in self.after.items() if self.before.get(name, ...) != value}
        return f"{' x '.join(self.keys)}: {_short(self.before)} -> {_short(changed)}"


def _short(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.model_dump(exclude_defaults=True) if hasattr(value, "model_dump") else value
        for name, value in settings.items()
    }


def draw(seed: int, count: int) -> Iterator[Pair]:
    """Yield `count` pairs whose two configurations are accepted and mean something else."""
    rng = random.Random(seed)
    while count:
        (one, base, change), (other, needed, changed) = rng.sample(SETTINGS, 2)
        context = needed | base | change | rng.choice((ONE_STEP, TWO_STEPS))
        changed = changed | (THRESHOLD if "error_max_len_threshold" in changed else {})
        context |= THRESHOLD if context.get("error_max_len_clip") and "error_max_len_threshold" in context else {}
        if (
            other in ELSEWHERE
            or {one, other} in NARROWER
            or any(context[name] != value for name, value in needed.items())
        ):
            continue
        pair = Pair((one, other), context, context | changed)
        before, after = accepted(pair.before), accepted(pair.after)
        if before is not None and after is not None and in_force(before) != in_force(after):
            count -= 1
            yield pair


def accepted(settings: dict[str, Any]) -> LearnerConfig | None:
    """Return the configuration, unless a check refuses it."""
    try:
        config = LearnerConfig(**settings)
    except ValidationError:
        return None
    issues = [
        *check_algorithm(config, group_size=4, groups_per_step=6, max_steps=100, tags=TAGS),
        *check_vtrace_weight(config),
        *check_effects(config, group_size=4),
        *check_learner(config),
    ]
    return None if [issue for issue in issues if not issue.path.endswith(".model_name_or_path")] else config


def in_force(config: LearnerConfig) -> dict[str, Any]:
    """Return the settings with defaults resolved: two ways to write the same are equal."""
    low = config.pg_clip if config.pg_clip_low is None else config.pg_clip_low
    high = config.pg_clip if config.pg_clip_high is None else config.pg_clip_high
    estimator = config.adv_estimator
    if estimator in OF_RETURNS or (estimator == "agentic_reinforce" and config.gamma == 1):
        estimator = "reinforce"
    filters = config.difficulty_mask or config.query_filter_config or config.group_filter_cls
    selection = config.zero_variance if config.compares_siblings or filters else "train"
    if selection == "mask" and config.variance_filter_ratio < 1:
        selection = "train"  # the filter leaves out groups of equal rewards first
    scopes = (config.mean_over, config.std_over, config.reward_normalization.grouping)
    resolved = {"adv_estimator": estimator, "clip": (low, high), "whiten_advantages": config.whitens_advantages}
    settings = config.model_dump(exclude={"pg_clip", "pg_clip_low", "pg_clip_high", "reward_normalization"})
    return settings | resolved | {"reward_normalization": scopes, "zero_variance": selection}


def has_effect(pair: Pair) -> bool:
    """Return whether the change changes what some batch trains."""
    before, after = LearnerConfig(**pair.before), LearnerConfig(**pair.after)
    return any(
        _differ(_numbers(before, groups, spread), _numbers(after, groups, spread))
        for groups in batches()
        for spread in (1.0, 4.0)
    )


def _differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape != two.shape or not torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def _numbers(config: LearnerConfig, groups: list[Group], spread: float) -> torch.Tensor:
    """Return everything that is trained with; nothing of a batch without signal."""
    if not any(carries_signal(group, config) for group in groups):
        return torch.zeros(0)
    return outcome(config, groups, first_step=config.ppo_epochs == 1, spread=spread).numbers()


@cache
def batches() -> list[list[Group]]:
    """Return batches on which a key that has an effect shows it, by their rewards."""
    few = rich_groups()
    many = [*few, *(_with_rewards(group, 0.7) for group in rich_groups(6)), *rich_groups(12)]
    return [few, *([_with_rewards(group, scale) for group in many] for scale in (1.0, -3.0, 0.55, 0.3, 1.5, 7.0))]


def _with_rewards(group: Group, scale: float) -> Group:
    members = [
        replace(member, turns=tuple(turn._replace(reward=scale * turn.reward + 0.1) for turn in member.turns))
        for member in group.trajectories
    ]
    return replace(group, trajectories=tuple(members))
