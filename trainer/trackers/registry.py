"""Tracker lookup and validation of `tracker_kwargs`.

Invariant: neither a tracker's library nor torch is imported.
"""

import inspect
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from offbeat.trainer.trackers.base import Tracker

TRACKERS: Mapping[str, str] = {
    "tensorboard": "offbeat.trainer.trackers.tensorboard:TensorBoard",
    "wandb": "offbeat.trainer.trackers.wandb:WeightsAndBiases",
    "mlflow": "offbeat.trainer.trackers.mlflow:MLflow",
    "swanlab": "offbeat.trainer.trackers.swanlab:SwanLab",
    "trackio": "offbeat.trainer.trackers.trackio:Trackio",
    "stdout": "offbeat.trainer.trackers.stdout:Stdout",
}
EXTRAS = ("wandb", "mlflow", "swanlab", "trackio")
"""Names of trackers, packages and extras."""
IN_LEARNER = ("tensorboard", "stdout")
"""Trackers run in the learner, without network."""
STOP_S = 5.0


class TrackerError(ValueError):
    def __init__(self, message: str, key: str = "") -> None:
        """key: of `tracker_kwargs`; empty if the tracker is unavailable."""
        super().__init__(message)
        self.key = key


def has_processes(names: Iterable[str]) -> bool:
    return any(name not in IN_LEARNER for name in names)


def find_tracker(name: str) -> type[Tracker]:
    """Return the class by name or `module:Class`.

    Raises:
        TrackerError: no such class, or package not installed.
    """
    path = TRACKERS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon or not module or not attribute:
        raise TrackerError(
            f"unknown tracker {name!r}: use one of {', '.join(TRACKERS)}, or a class path `module:Class`"
        )
    try:
        tracker = getattr(import_module(module), attribute, None)
    except (ImportError, TypeError, ValueError) as error:
        raise TrackerError(f"can't import {module!r}: {error}") from error
    except Exception as error:  # a user's module may raise anything
        raise TrackerError(f"can't import {module!r}: {type(error).__name__}: {error}") from error
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise TrackerError(f"{path} is not a class that inherits from offbeat.trainer.trackers.base.Tracker")
    if inspect.isabstract(tracker):
        raise TrackerError(f"{path} does not define {', '.join(sorted(tracker.__abstractmethods__))}")
    if name in EXTRAS and find_spec(name) is None:
        raise TrackerError(f"{name} is not installed: uv pip install 'offbeat[{name}]'")
    return tracker


def arguments(tracker: type[Tracker], kwargs: Mapping[str, JsonValue]) -> dict[str, Any]:
    """Validate `tracker_kwargs`; convert to `__init__`'s types.

    Raises:
        TrackerError: the first of `argument_errors`.
    """
    for error in argument_errors(tracker, kwargs):
        raise error
    types = typing.get_type_hints(tracker.__init__)
    return {key: _convert(key, value, types.get(key, Any)) for key, value in kwargs.items()}


def argument_errors(tracker: type[Tracker], kwargs: Mapping[str, JsonValue]) -> Iterator[TrackerError]:
    """Yield errors for unknown, missing and mistyped keys."""
    parameters = list(inspect.signature(tracker).parameters.values())[1:]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    types = typing.get_type_hints(tracker.__init__)
    for key, value in kwargs.items():
        if key not in named and not accepts_any:
            takes = f"it takes {', '.join(named)}" if named else "it takes none"
            yield TrackerError(f"no such argument: {takes}{SECRET_HINT if key in SECRET_KEYS else ''}", key)
            continue
        try:
            _convert(key, value, types.get(key, Any))
        except TrackerError as error:
            yield error
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in kwargs:
            yield TrackerError("required, and missing", key)


SECRET_KEYS = ("api_key", "login_kwargs", "key")
SECRET_HINT = "; set API keys in the environment of the learner or use the tracker's own login, not the configuration"


def _convert(key: str, value: JsonValue, expected: Any) -> Any:
    try:
        converted = TypeAdapter(expected).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        messages = dict.fromkeys(
            detail["msg"].removeprefix("Input should be ").replace("a valid ", "a ") for detail in error.errors()
        )
        raise TrackerError(f"expected {' or '.join(messages)}, got {value!r}", key) from error
    if isinstance(converted, Path) and "://" in str(value):
        raise TrackerError(f"expected a folder of a file system, got the URL {value!r}; copy the folder there", key)
    return converted
