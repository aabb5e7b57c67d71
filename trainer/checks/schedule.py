"""Learning-rate schedules that a run can't follow, or that would raise the rate above its peak: told before it starts."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.schedule import LRScheduler

SETTINGS = "actor_train.training_args.lr_scheduler_kwargs"
LR_END = 1e-7
"""transformers' own, where `polynomial` is told none."""
SHARES = ("min_lr_rate", "min_lr_ratio")
COUNTS = ("num_decay_steps", "num_stable_steps", "timescale")
PLAIN = ("constant", "constant_with_warmup", "linear", "cosine")
"""Without settings these stay between 0 and the peak by their formulas, and nobody has to import torch to look."""
NOISE = 1e-9
MOST_LOOKS = 1000
"""Steps at which a schedule is looked at, evenly over the run."""


class Peak(NamedTuple):
    """What a schedule moves: the key that holds its peak, and its own warm-up."""

    key: str
    rate: float
    warmup_key: str
    warmup_steps: int


def check_schedule(config: LearnerConfig) -> Iterator[ConfigIssue]:
    """Everything that is wrong with the schedule's settings for this run's rates and length."""
    args = config.actor_train.training_args
    name, settings = args.lr_scheduler_type, args.lr_scheduler_kwargs
    found = list(_check_setting(settings))
    for peak in _peaks(config) if not found else ():
        found += _check_warmup(peak, name, config.max_steps) if settings else ()
        found += _check_floor(peak, name, settings)
    yield from found
    for peak in _peaks(config) if not found and (settings or name not in PLAIN) else ():
        yield from _walked(peak, name, settings, config.max_steps)


def _peaks(config: LearnerConfig) -> Iterator[Peak]:
    args, critic = config.actor_train.training_args, config.critic
    here = "actor_train.training_args"
    yield Peak(f"{here}.learning_rate", args.learning_rate, f"{here}.warmup_steps", args.warmup_steps)
    if config.adv_estimator == "gae":
        yield Peak("critic.learning_rate", critic.learning_rate, "critic.warmup_steps", critic.warmup_steps)


def _check_setting(settings: Mapping[str, JsonValue]) -> Iterator[ConfigIssue]:
    for key, value in settings.items():
        path, number = f"{SETTINGS}.{key}", isinstance(value, int | float) and not isinstance(value, bool)
        if key == "decay_type":
            continue
        if not number or not math.isfinite(float(value)) or float(value) < 0:  # pyright: ignore[reportArgumentType]
            yield ConfigIssue(path, f"expected a number of 0 or more, got {value!r}")
        elif key in SHARES and float(value) > 1:  # pyright: ignore[reportArgumentType]
            yield ConfigIssue(path, f"{value} is no share of the learning rate: take one between 0 and 1")
        elif key in COUNTS and (not isinstance(value, int) or (value < 1 and key != "num_stable_steps")):
            yield ConfigIssue(path, f"expected a whole number of steps, 1 or more, got {value!r}")


def _check_warmup(peak: Peak, name: LRScheduler, max_steps: int) -> Iterator[ConfigIssue]:
    """Of a schedule whose settings would have no effect; a few steps of a longer run's plain schedule are a fair trial."""
    if peak.warmup_steps >= max_steps:
        yield ConfigIssue(
            peak.warmup_key,
            f"lr_scheduler_type {name} begins after {peak.warmup_steps} steps, and max_steps is {max_steps}, so that its "
            f"lr_scheduler_kwargs would do nothing: warm up for at most {max_steps - 1} steps, or leave them out",
        )


def _check_floor(peak: Peak, name: LRScheduler, settings: Mapping[str, JsonValue]) -> Iterator[ConfigIssue]:
    floor = settings.get("min_lr")
    if isinstance(floor, int | float) and peak.rate and floor > peak.rate:
        yield ConfigIssue(
            f"{SETTINGS}.min_lr",
            f"{floor:g} is above {peak.key} {peak.rate:g}, which falls to it: take at most that, or min_lr_rate, a share",
        )
    end = settings.get("lr_end", LR_END)
    if name == "polynomial" and isinstance(end, int | float) and peak.rate and end >= peak.rate:
        said = "" if "lr_end" in settings else " (transformers' own)"
        yield ConfigIssue(
            f"{SETTINGS}.lr_end",
            f"{end:g}{said} is not below {peak.key} {peak.rate:g}, which falls to it: take a smaller one",
        )


def _walked(peak: Peak, name: LRScheduler, settings: Mapping[str, JsonValue], max_steps: int) -> Iterator[ConfigIssue]:
    """The schedule itself is asked: what it refuses, or gets wrong, no run should find out."""
    from offbeat.trainer.engines.schedule import scheduled_rate

    def rate(step: int) -> float:
        return scheduled_rate(
            step,
            peak=peak.rate,
            scheduler=name,
            warmup_steps=peak.warmup_steps,
            total_steps=max_steps,
            settings=settings,
        )

    looks = [*range(0, max_steps, math.ceil(max_steps / MOST_LOOKS)), max_steps - 1]
    try:
        wrong = next((s for s in looks if not -NOISE <= rate(s) <= peak.rate * (1 + NOISE)), None)
    except (ValueError, TypeError, ArithmeticError) as error:
        yield ConfigIssue(SETTINGS, f"lr_scheduler_type {name} does not take {dict(settings)}: {error}")
        return
    if wrong is not None:
        yield ConfigIssue(
            SETTINGS,
            f"lr_scheduler_type {name} with {dict(settings)} makes {rate(wrong):g} of {peak.key} {peak.rate:g} at step "
            f"{wrong}: a rate stays between 0 and its peak",
        )
