import inspect
from collections.abc import Callable
from typing import Any

from offbeat.envs.class_path import load_object
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import RewardFunction, ThreadedFunction, read_number
from offbeat.services.reward.kinds.config import UserFunctionConfig
from offbeat.services.reward.sample import RewardSample


def build_user_function(config: UserFunctionConfig) -> RewardFunction:
    """Build the function, `async` or plain; raises ValueError if there is none that takes `args`."""
    function = _load(config)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return _AsyncFunction(function, config)

    def score(sample: RewardSample) -> float:
        try:
            return _read(function(sample, **config.args), config)
        except RewardError:
            raise
        except Exception as error:  # user code raises anything
            raise _failed(config, error) from error

    return ThreadedFunction(score, num_threads=config.max_concurrent, timeout_s=config.timeout_s)


def _load(config: UserFunctionConfig) -> Callable[..., Any]:
    name = f"reward {config.name!r}: {config.path}"
    try:
        function = load_object(config.path)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{name} can't be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return function
    try:
        signature.bind(None, **config.args)
    except TypeError as error:
        raise ValueError(f"{name} can't be called with a sample and `args`: {error}") from error
    return function


class _AsyncFunction:
    def __init__(self, function: Callable[..., Any], config: UserFunctionConfig) -> None:
        self._function = function
        self._config = config

    async def score(self, sample: RewardSample) -> float:
        try:
            return _read(await self._function(sample, **self._config.args), self._config)
        except RewardError:
            raise
        except Exception as error:  # user code raises anything
            raise _failed(self._config, error) from error

    async def close(self) -> None: ...


def _read(value: Any, config: UserFunctionConfig) -> float:
    try:
        return read_number(value, config.path)
    except RewardError as error:  # another attempt would not mend it
        raise RewardError(Failure.ERROR, error.detail) from None


def _failed(config: UserFunctionConfig, error: Exception) -> RewardError:
    return RewardError(Failure.ERROR, f"{config.path} raised {type(error).__name__}: {error}")
