"""Sleep of a worker whose GPU others use."""

import inspect

import pytest

from offbeat.services.generation.vllm.sleeping import MEMORY_GREW, tolerate_memory_growth


def test_memory_that_others_take_meanwhile_does_not_fail_a_sleep() -> None:
    levels: list[int] = []

    def sleep(worker: object, level: int = 1) -> None:
        del worker
        levels.append(level)
        raise AssertionError(f"{MEMORY_GREW}.")

    tolerate_memory_growth(sleep)(object())
    tolerate_memory_growth(sleep)(object(), level=2)
    assert levels == [1, 2]


def test_other_errors_of_a_sleep_are_raised() -> None:
    def sleep(worker: object) -> None:
        del worker
        raise AssertionError("not asleep")

    with pytest.raises(AssertionError, match="not asleep"):
        tolerate_memory_growth(sleep)(object())


@pytest.mark.slow
def test_vllm_frees_memory_before_the_check_that_is_ignored() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    _, freed, rest = inspect.getsource(inspect.unwrap(Worker.sleep)).partition("sleep_mode_backend.suspend(")
    assert freed
    assert MEMORY_GREW in rest
