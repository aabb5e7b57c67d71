"""Configuration of rewards (`rewards` and `combine`)."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from offbeat.envs.config import Config
from offbeat.services.reward.kinds.config import (
    CodeSandboxConfig,
    CrossThinkQAConfig,
    DetectionConfig,
    HttpConfig,
    IFEvalConfig,
    MathRuleConfig,
    MultipleChoiceConfig,
    NemoGymConfig,
    RegexConfig,
    RewardConfig,
    UserFunctionConfig,
)
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig, RewardModelConfig

AnyReward = Annotated[
    MathRuleConfig
    | MultipleChoiceConfig
    | RegexConfig
    | CrossThinkQAConfig
    | DetectionConfig
    | IFEvalConfig
    | UserFunctionConfig
    | HttpConfig
    | NemoGymConfig
    | CodeSandboxConfig
    | LlmJudgeConfig
    | RewardModelConfig,
    Field(discriminator="kind"),
]

COLUMN = "reward/"
"""Prefix of a trajectory's metrics."""
Combine = Literal["weighted", "product", "gate"]


class RewardsConfig(Config):
    """Reward functions of a run, and how they make one score."""

    rewards: tuple[AnyReward, ...]
    combine: Combine = "weighted"
    """`weighted`: sum of weight times value. `product`: of the values. `gate`: 0 if a reward with a `threshold` is
    below it, else the weighted sum of the others (1 without any).
    """

    @model_validator(mode="after")
    def _is_consistent(self) -> "RewardsConfig":
        names = [reward.name for reward in self.rewards]
        if not names:
            raise ValueError("rewards: name at least one")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rewards: the name {repeated[0]!r} occurs twice; names are columns of the trajectory")
        gates = [reward.name for reward in self.rewards if reward.threshold is not None]
        if self.combine == "gate" and not gates:
            raise ValueError("combine: gate needs a reward with a threshold")
        if self.combine != "gate" and gates:
            raise ValueError(f"the threshold of reward {gates[0]!r} needs combine: gate")
        weighted = [reward.name for reward in self.rewards if reward.weight != 1]
        if self.combine == "product" and weighted:
            raise ValueError(f"the weight of reward {weighted[0]!r} has no effect with combine: product; leave it out")
        return self

    def of_tag(self, tag: str) -> list[RewardConfig]:
        return [reward for reward in self.rewards if not reward.tags or tag in reward.tags]

    def check_tags(self, tags: Iterable[str]) -> None:
        """Raise ValueError unless every tag has a reward and every reward's tag exists."""
        known = sorted({*tags})
        for tag in known:
            if not self.of_tag(tag):
                raise ValueError(f"no reward scores tag {tag!r}: name it in `tags` of one, or leave `tags` out")
        self.check_named_tags(known)

    def check_named_tags(self, tags: Iterable[str]) -> None:
        """Raise ValueError unless every reward's tag exists."""
        known = {*tags}
        for reward in self.rewards:
            if unknown := [tag for tag in reward.tags if tag not in known]:
                raise ValueError(
                    f"reward {reward.name!r}: there is no tag {unknown[0]!r}; there is {', '.join(sorted(known))}"
                )
