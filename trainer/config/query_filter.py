from typing import Literal

from pydantic import Field, model_validator

from offbeat.envs.config import Config


class QueryFilterArgs(Config):
    threshold_down: float = 0.0
    """Mean reward above which `mean_filter` trains a group."""
    threshold_up: float = 1.0
    """Mean reward below which it does."""
    std_threshold: float = Field(default=0.0, ge=0)
    """Deviation of rewards above which `std_filter` trains a group."""


class QueryFilter(Config):
    """Condition on a group's rewards, without which it carries no signal (`zero_variance`)."""

    type: Literal["mean_filter", "std_filter"]
    filter_args: QueryFilterArgs = QueryFilterArgs()

    @model_validator(mode="after")
    def _has_an_effect(self) -> "QueryFilter":
        idle = ("std_threshold",) if self.type == "mean_filter" else ("threshold_down", "threshold_up")
        for name in idle:
            if getattr(self.filter_args, name) != QueryFilterArgs.model_fields[name].default:
                raise ValueError(f"filter_args.{name} has no effect with type {self.type}: leave it out")
        return self
