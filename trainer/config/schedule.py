"""Learning-rate schedules by transformers' names, and which settings each of them takes."""

from typing import Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from offbeat.envs.config import Config

Scheduler = Literal["constant", "linear", "cosine"]
"""Of the entropy bonus."""
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
"""Settings of each; those of its warm-up are left out, because ours stands in for it."""
NEEDED: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": MIN_LR,
    "cosine_warmup_with_min_lr": MIN_LR,
    "warmup_stable_decay": ("num_decay_steps",),
}
"""One of these must be given."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")


class ScheduleArgs(Config):
    """How the learning rate moves over a run; transformers' names and formulas."""

    lr_scheduler_type: LRScheduler = "constant"
    """After `warmup_steps`, during which it rises linearly and whose first step learns already."""
    lr_scheduler_kwargs: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue], validate_default=True)
    """The schedule's own settings, such as `min_lr_rate`, `num_cycles`, `num_decay_steps`."""

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def _depends_on_the_step_alone(cls, value: object) -> object:
        """Raises ValueError for schedules that a resumed run could not repeat."""
        if value in BY_METRIC:
            raise ValueError(
                f"{value} follows a metric, and rates here depend on the step alone: take one of {', '.join(KWARGS)}"
            )
        return value

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _are_the_schedules(cls, value: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        name = info.data.get("lr_scheduler_type")
        if name is None:  # refused already
            return value
        if foreign := sorted(set(value) - set(KWARGS[name])):
            takes = ", ".join(KWARGS[name]) or "nothing"
            raise ValueError(f"lr_scheduler_type {name} has no {', '.join(foreign)}: it takes {takes}")
        if name in NEEDED and not set(NEEDED[name]) & set(value):
            raise ValueError(f"lr_scheduler_type {name} needs {' or '.join(NEEDED[name])}")
        if len(set(MIN_LR) & set(value)) == 2:
            raise ValueError("min_lr and min_lr_rate say the same twice: give one")
        return value
