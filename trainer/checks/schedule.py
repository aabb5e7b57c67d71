import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.schedule import LRScheduler

SETTINGS = "actor_train.training_args.lr_scheduler_kwargs"
DEFAULT_LR_END = 1e-7
"""transformers' default for `polynomial`."""
FRACTION_KEYS = ("min_lr_rate", "min_lr_ratio")
STEP_COUNT_KEYS = ("num_decay_steps", "num_stable_steps", "timescale")
SIMPLE_SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
"""Schedules within [0, peak] without settings, checked without torch."""
RELATIVE_TOLERANCE = 1e-9
MAX_CHECKED_STEPS = 1000
"""Evenly spaced steps evaluated."""


class Peak(NamedTuple):
    """Learning rate that the schedule scales."""

    key: str
    rate: float
    warmup_key: str
    warmup_steps: int


def check_schedule(config: LearnerConfig) -> Iterator[ConfigIssue]:
    args = config.actor_train.training_args
    name, settings = args.lr_scheduler_type, args.lr_scheduler_kwargs
    issues = list(_check_setting(settings))
    for peak in _peaks(config) if not issues else ():
        issues += _check_warmup(peak, name, config.max_steps) if settings else ()
        issues += _check_floor(peak, name, settings)
    yield from issues
    for peak in _peaks(config) if not issues and (settings or name not in SIMPLE_SCHEDULES) else ():
        yield from _check_rates(peak, name, settings, config.max_steps)


def _peaks(config: LearnerConfig) -> Iterator[Peak]:
    args, critic = config.actor_train.training_args, config.critic.training_args
    prefix, critic_prefix = "actor_train.training_args", "critic.training_args"
    yield Peak(f"{prefix}.learning_rate", args.learning_rate, f"{prefix}.warmup_steps", args.warmup_steps)
    if config.adv_estimator == "gae":
        key = f"{critic_prefix}.learning_rate"
        yield Peak(key, critic.learning_rate, f"{critic_prefix}.warmup_steps", critic.warmup_steps)


def _check_setting(settings: Mapping[str, JsonValue]) -> Iterator[ConfigIssue]:
    for key, value in settings.items():
        path, number = f"{SETTINGS}.{key}", isinstance(value, int | float) and not isinstance(value, bool)
        if key == "decay_type":
            continue
        if not number or not math.isfinite(float(value)) or float(value) < 0:  # pyright: ignore[reportArgumentType]
            yield ConfigIssue(path, f"expected a number of 0 or more, got {value!r}")
        elif key in FRACTION_KEYS and float(value) > 1:  # pyright: ignore[reportArgumentType]
            yield ConfigIssue(path, f"{value} is not a fraction of the learning rate: take one between 0 and 1")
        elif key in STEP_COUNT_KEYS and (not isinstance(value, int) or (value < 1 and key != "num_stable_steps")):
            yield ConfigIssue(path, f"expected an integer number of steps, 1 or more, got {value!r}")


def _check_warmup(peak: Peak, name: LRScheduler, max_steps: int) -> Iterator[ConfigIssue]:
    if peak.warmup_steps >= max_steps:
        yield ConfigIssue(
            peak.warmup_key,
            f"lr_scheduler_type {name} starts after {peak.warmup_steps} steps, but max_steps is {max_steps}, so that its "
            f"lr_scheduler_kwargs have no effect: warm up for at most {max_steps - 1} steps, or leave them out",
        )


def _check_floor(peak: Peak, name: LRScheduler, settings: Mapping[str, JsonValue]) -> Iterator[ConfigIssue]:
    floor = settings.get("min_lr")
    if isinstance(floor, int | float) and peak.rate and floor > peak.rate:
        yield ConfigIssue(
            f"{SETTINGS}.min_lr",
            f"{floor:g} is above {peak.key} {peak.rate:g}, the peak: take a smaller one, or min_lr_rate, a fraction of it",
        )
    end = settings.get("lr_end", DEFAULT_LR_END)
    if name == "polynomial" and isinstance(end, int | float) and peak.rate and end >= peak.rate:
        origin = "" if "lr_end" in settings else " (transformers' default)"
        yield ConfigIssue(
            f"{SETTINGS}.lr_end",
            f"{end:g}{origin} is not below {peak.key} {peak.rate:g}, the peak: take a smaller one",
        )


def _check_rates(
    peak: Peak, name: LRScheduler, settings: Mapping[str, JsonValue], max_steps: int
) -> Iterator[ConfigIssue]:
    """Require accepted settings and rates in [0, peak]."""
    from offbeat.trainer.engines.schedule import scheduled_rate  # noqa: PLC0415  imports torch

    def rate(step: int) -> float:
        return scheduled_rate(
            step,
            peak=peak.rate,
            scheduler=name,
            warmup_steps=peak.warmup_steps,
            total_steps=max_steps,
            settings=settings,
        )

    steps = [*range(0, max_steps, math.ceil(max_steps / MAX_CHECKED_STEPS)), max_steps - 1]
    try:
        bad_step = next(
            (s for s in steps if not -RELATIVE_TOLERANCE <= rate(s) <= peak.rate * (1 + RELATIVE_TOLERANCE)), None
        )
    except (ValueError, TypeError, ArithmeticError) as error:
        yield ConfigIssue(SETTINGS, f"lr_scheduler_type {name} rejects {dict(settings)}: {error}")
        return
    if bad_step is not None:
        yield ConfigIssue(
            SETTINGS,
            f"lr_scheduler_type {name} with {dict(settings)} gives {rate(bad_step):g} at step {bad_step}: it must "
            f"stay between 0 and {peak.key} {peak.rate:g}",
        )
