"""Learning-rate schedules, named as in transformers."""

from typing import Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from offbeat.envs.config import Config

Scheduler = Literal["constant", "linear", "cosine"]
"""Schedules of the entropy bonus."""
LRScheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip
MIN_LR = ("min_lr", "min_lr_rate")
KWARGS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", *MIN_LR),
    "cosine_warmup_with_min_lr": ("num_cycles", *MIN_LR),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "decay_type", "min_lr_ratio", "num_cycles"),
}
"""Settings by schedule; `warmup_steps` replaces those of warm-up."""
REQUIRED: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": MIN_LR,
    "cosine_warmup_with_min_lr": MIN_LR,
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Of which one is required."""
METRIC_DRIVEN = ("reduce_lr_on_plateau", "greedy")


class ScheduleArgs(Config):
    lr_scheduler_type: LRScheduler = "constant"
    """Schedule after linear `warmup_steps`."""
    lr_scheduler_kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue], validate_default=True)
    """Settings, such as `min_lr_rate`, `num_cycles`, `num_decay_steps`."""

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def _depends_on_step_alone(cls, value: object) -> object:
        """Reject schedules that a resumed run can't reproduce."""
        if value in METRIC_DRIVEN:
            raise ValueError(
                f"{value} depends on a metric, but rates must depend on the step alone: take one of {', '.join(KWARGS)}"
            )
        return value

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _fit_schedule(cls, value: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        name = info.data.get("lr_scheduler_type")
        if name is None:  # already rejected
            return value
        if unknown := sorted(set(value) - set(KWARGS[name])):
            accepted = ", ".join(KWARGS[name]) or "nothing"
            raise ValueError(f"lr_scheduler_type {name} has no {', '.join(unknown)}: it takes {accepted}")
        if name in REQUIRED and not set(REQUIRED[name]) & set(value):
            raise ValueError(f"lr_scheduler_type {name} needs {' or '.join(REQUIRED[name])}")
        if len(set(MIN_LR) & set(value)) == 2:
            raise ValueError("min_lr and min_lr_rate exclude each other: set one")
        return value
