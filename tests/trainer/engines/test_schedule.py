"""Learning rates by step."""

import inspect
import math
from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.trainer.checks.schedule import check_schedule
from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.roles import CriticConfig, CriticTrainingArgs
from offbeat.trainer.config.schedule import KWARGS, METRIC_DRIVEN
from offbeat.trainer.engines.schedule import plateau_rate, scheduled_rate


def rates(scheduler: str, steps: list[int]) -> list[float]:
    return [
        scheduled_rate(s, peak=2.0, scheduler=scheduler, warmup_steps=4, total_steps=14)  # pyright: ignore[reportArgumentType]
        for s in steps
    ]


def test_every_schedule_warms_up_and_its_first_step_already_learns() -> None:
    for scheduler in ("constant", "linear", "cosine"):
        assert rates(scheduler, [0, 1, 2, 3]) == [0.5, 1.0, 1.5, 2.0]


def test_constant_stays_linear_falls_and_cosine_bends() -> None:
    assert rates("constant", [4, 9, 14, 99]) == [2.0] * 4
    assert rates("linear", [4, 9, 14, 99]) == [2.0, 1.0, 0.0, 0.0]
    assert rates("cosine", [4, 9, 14, 99]) == pytest.approx([2.0, 1.0, 0.0, 0.0])


def waves(done: float, cycles: float, low: float) -> float:
    return low + (1 - low) * 0.5 * (1 + math.cos(2 * math.pi * cycles * done))


BY_HAND: dict[str, tuple[str, dict[str, Any], Any]] = {
    "waves": ("cosine", {"num_cycles": 1.5}, lambda d: waves(d, 1.5, 0.0)),
    "restarts": ("cosine_with_restarts", {"num_cycles": 2}, lambda d: waves((2 * d) % 1.0, 0.5, 0.0) if d < 1 else 0.0),
    "polynomial": ("polynomial", {"lr_end": 0.5, "power": 2.0}, lambda d: (0.5 + 1.5 * (1 - d) ** 2) / 2),
    "inverse square root": ("inverse_sqrt", {}, lambda d: 1 / math.sqrt((4 + 10 * d) / 4)),
    "floor": ("cosine_with_min_lr", {"min_lr": 0.4}, lambda d: waves(d, 0.5, 0.2)),
    "floor by share": ("cosine_with_min_lr", {"min_lr_rate": 0.2}, lambda d: waves(d, 0.5, 0.2)),
    "own floor": ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}, lambda d: waves(d + 0.1, 0.5, 0.2)),
    "stable, then down": (
        "warmup_stable_decay",
        {"num_decay_steps": 5, "decay_type": "linear"},
        lambda d: 1 - max(0.0, 2 * d - 1),
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_schedules_follow_transformers_formulas_after_the_warm_up(case: str) -> None:
    name, settings, factor = BY_HAND[case]
    given = TrainingArgs.model_validate({"lr_scheduler_type": name, "lr_scheduler_kwargs": settings})
    for step in range(14):
        rate = scheduled_rate(
            step,
            peak=2.0,
            scheduler=given.lr_scheduler_type,
            warmup_steps=4,
            total_steps=14,
            settings=given.lr_scheduler_kwargs,
        )
        expected = 0.5 * (step + 1) if step < 4 else 2.0 * factor((step - 4) / 10)
        assert rate == pytest.approx(expected, abs=1e-12), step


def test_every_transformers_schedule_is_supported_or_rejected() -> None:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    known = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    assert set(known) == set(KWARGS) | set(METRIC_DRIVEN)
    ours = {"optimizer", "last_epoch", "num_warmup_steps", "num_training_steps", "warmup_type", "warmup_lr_rate"}
    for name, settings in KWARGS.items():
        assert set(settings) == set(inspect.signature(known[name]).parameters) - ours


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("reduce_lr_on_plateau", {}, "the step alone"),
        ("linear", {"num_cycles": 2}, "takes nothing"),
        ("polynomial", {"num_cycles": 2}, "lr_end, power"),
        ("cosine_with_min_lr", {}, "min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "exclude each other"),
        ("warmup_stable_decay", {}, "num_decay_steps"),
    ],
)
def test_unknown_and_missing_settings_are_rejected(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainingArgs.model_validate({"lr_scheduler_type": name, "lr_scheduler_kwargs": settings})


def schedule(name: str, settings: dict[str, Any], *, steps: int = 20, **changes: Any) -> LearnerConfig:
    given = {"learning_rate": 1e-3, "lr_scheduler_type": name, "lr_scheduler_kwargs": settings} | changes
    return LearnerConfig.model_validate({"max_steps": steps, "actor_train": {"training_args": given}})


AT = "actor_train.training_args"


@pytest.mark.parametrize(
    ("config", "path", "says"),
    [
        (schedule("cosine_with_min_lr", {"min_lr": 0.1}), "lr_scheduler_kwargs.min_lr", "learning_rate 0.001"),
        (schedule("cosine_with_min_lr", {"min_lr": -1.0}), "lr_scheduler_kwargs.min_lr", "0 or more"),
        (schedule("cosine_with_min_lr", {"min_lr_rate": 1.5}), "lr_scheduler_kwargs.min_lr_rate", "between 0 and 1"),
        (schedule("cosine_with_min_lr", {"min_lr": "0.1"}), "lr_scheduler_kwargs.min_lr", "number"),
        (schedule("polynomial", {"lr_end": 1e-3}), "lr_scheduler_kwargs.lr_end", "not below"),
        (schedule("polynomial", {}, learning_rate=1e-7), "lr_scheduler_kwargs.lr_end", "transformers' default"),
        (schedule("cosine", {"num_cycles": 2}, warmup_steps=20), "warmup_steps", "at most 19"),
        (schedule("warmup_stable_decay", {"num_decay_steps": 2.5}), "lr_scheduler_kwargs.num_decay_steps", "integer"),
        (
            schedule("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "steep"}),
            "lr_scheduler_kwargs",
            "steep",
        ),
        (schedule("inverse_sqrt", {"timescale": 0}), "lr_scheduler_kwargs.timescale", "1 or more"),
    ],
)
def test_invalid_schedule_values_are_rejected(config: LearnerConfig, path: str, says: str) -> None:
    found = list(check_schedule(config))
    assert [(each.path, says in each.message) for each in found] == [(f"{AT}.{path}", True)], found


def test_an_absolute_floor_is_held_against_the_critics_rate_too() -> None:
    config = schedule("cosine_with_min_lr", {"min_lr": 5e-4})
    assert not list(check_schedule(config))
    critic = config.model_copy(
        update={"adv_estimator": "gae", "critic": CriticConfig(training_args=CriticTrainingArgs(learning_rate=1e-4))}
    )
    (found,) = check_schedule(critic)
    assert "critic.training_args.learning_rate 0.0001" in found.message


@pytest.mark.parametrize("steps", [14, 1_000_000_000])
@pytest.mark.parametrize("case", BY_HAND)
def test_schedules_that_rates_can_follow_are_not_refused(case: str, steps: int) -> None:
    name, settings, _ = BY_HAND[case]
    assert not list(check_schedule(schedule(name, settings, steps=steps, learning_rate=2.0, warmup_steps=4)))


def test_the_plateau_falls_over_its_second_half() -> None:
    found = [plateau_rate(s, peak=1.0, warmup_steps=2, total_steps=10, final_ratio=0.1) for s in range(10)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 0.82, 0.64, 0.46, 0.28, 0.1])
