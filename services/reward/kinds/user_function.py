import inspect
from collections.abc import Callable
from typing import Any, Generic

from offbeat.envs.class_path import load_object
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import (
    GroupFunction,
    RewardFunction,
    SampleT,
    ThreadedFunction,
    ValueT,
    read_number,
    read_numbers,
)
from offbeat.services.reward.kinds.config import UserFunctionConfig


def build_user_function(config: UserFunctionConfig) -> RewardFunction:
    """Build the function, `async` or plain; raises ValueError if there is none that takes `args`."""
    return _build(config, lambda sample: sample, lambda value, _: read_number(value, config.path))


def build_user_group_function(config: UserFunctionConfig) -> GroupFunction:
    """Build a function of a group's members; raises as `build_user_function`."""
    return _build(
        config,
        lambda sample: list(sample.members),
        lambda value, sample: read_numbers(value, len(sample.members), config.path),
    )


def _build(
    config: UserFunctionConfig, argument: Callable[[SampleT], Any], read: Callable[[Any, SampleT], ValueT]
) -> RewardFunction[SampleT, ValueT]:
    """argument: what the function takes of a sample; read: its result for a sample."""
    function = _load(config)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return _AsyncFunction(function, config, argument, read)

    def score(sample: SampleT) -> ValueT:
        try:
            return _read(function(argument(sample), **config.args), sample, read)
        except RewardError:
            raise
        except Exception as error:  # user code raises anything
            raise _failed(config, error) from error

    return ThreadedFunction(score, num_threads=config.max_concurrent, timeout_s=config.timeout_s)


def _load(config: UserFunctionConfig) -> Callable[..., Any]:
    name = f"reward {config.name!r}: {config.path}"
    takes = "a list of samples" if config.is_of_group else "a sample"
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
        raise ValueError(f"{name} can't be called with {takes} and `args`: {error}") from error
    return function


class _AsyncFunction(Generic[SampleT, ValueT]):
    def __init__(
        self,
        function: Callable[..., Any],
        config: UserFunctionConfig,
        argument: Callable[[SampleT], Any],
        read: Callable[[Any, SampleT], ValueT],
    ) -> None:
        self._function = function
        self._config = config
        self._argument = argument
        self._result = read

    async def score(self, sample: SampleT) -> ValueT:
        try:
            value = await self._function(self._argument(sample), **self._config.args)
            return _read(value, sample, self._result)
        except RewardError:
            raise
        except Exception as error:  # user code raises anything
            raise _failed(self._config, error) from error

    async def close(self) -> None: ...


def _read(value: Any, sample: SampleT, read: Callable[[Any, SampleT], ValueT]) -> ValueT:
    try:
        return read(value, sample)
    except RewardError as error:  # another attempt would not mend it
        raise RewardError(Failure.ERROR, error.detail) from None


def _failed(config: UserFunctionConfig, error: Exception) -> RewardError:
    return RewardError(Failure.ERROR, f"{config.path} raised {type(error).__name__}: {error}")
