"""Learning rates by step."""

import pytest

from trainer.engines.schedule import plateau_rate, scheduled_rate


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


def test_the_plateau_falls_over_its_second_half() -> None:
    found = [plateau_rate(s, peak=1.0, warmup_steps=2, total_steps=10, final_ratio=0.1) for s in range(10)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 0.82, 0.64, 0.46, 0.28, 0.1])
