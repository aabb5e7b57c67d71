import pytest

from offbeat.services import retry
from offbeat.services.errors import ControlError, RetryableError
from offbeat.services.retry import retry_until_answered


class Service:
    """Answers the call with this number, counted from 1; those before with an error."""

    def __init__(self, answers: int, error: Exception) -> None:
        self._answers = answers
        self._error = error
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls < self._answers:
            raise self._error
        return "created"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.0)


async def test_a_service_that_is_slow_at_first_is_asked_again() -> None:
    service = Service(4, RetryableError("it can't be reached"))
    assert await retry_until_answered(service, 1000.0) == "created"
    assert service.calls == 4


async def test_who_has_no_patience_left_hears_the_last_error() -> None:
    service = Service(10**9, RetryableError("it can't be reached"))
    with pytest.raises(RetryableError, match="can't be reached"):
        await retry_until_answered(service, 0.0)


async def test_a_refusal_is_no_reason_to_try_again() -> None:
    service = Service(2, ControlError("no"))
    with pytest.raises(ControlError, match="no"):
        await retry_until_answered(service, 1000.0)
    assert service.calls == 1
