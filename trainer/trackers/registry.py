"""Trackers by name or class path, and what each can be told.

Invariant: looking one up imports neither the library behind it nor torch.
"""

import inspect
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
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
"""Trackers whose package, of the same name, is an extra of the same name."""
IN_LEARNER = ("tensorboard", "stdout")
"""They write to this machine and can't wait for anybody: they need no process of their own."""


STOP_S = 5.0
"""What the processes of the others get to end where somebody waits for a learner to stop."""


class TrackerError(ValueError):
    """A tracker can't be had, or can't be told what it was."""

    def __init__(self, message: str, key: str = "") -> None:
        """key: of `tracker_kwargs`, below the tracker; empty where the tracker itself is wrong."""
        super().__init__(message)
        self.key = key


def has_processes(names: Iterable[str]) -> bool:
    """Whether any of them has a process of its own."""
    return any(name not in IN_LEARNER for name in names)


def find_tracker(name: str) -> type[Tracker]:
    """The class of a name, or of a path `module:Class`.

    Raises:
        TrackerError: there is none, or its package is not installed.
    """
    path = TRACKERS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon or not module or not attribute:
        raise TrackerError(
            f"no tracker {name!r}: there is {', '.join(TRACKERS)}, or a class of yours as `module:Class`"
        )
    try:
        found = getattr(import_module(module), attribute, None)
    except (ImportError, TypeError, ValueError) as error:
        raise TrackerError(f"can't import {module!r}: {error}") from error
    except Exception as error:  # the module is the user's own: a mistake in it is told
        raise TrackerError(f"can't import {module!r}: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise TrackerError(f"{path} is no class that inherits from offbeat.trainer.trackers.base.Tracker")
    if inspect.isabstract(found):
        raise TrackerError(f"{path} does not define {', '.join(sorted(found.__abstractmethods__))}")
    if name in EXTRAS and find_spec(name) is None:
        raise TrackerError(f"{name} is not installed: uv pip install 'offbeat[{name}]'")
    return found


def arguments(tracker: type[Tracker], told: Mapping[str, JsonValue]) -> dict[str, Any]:
    """What `__init__` is called with besides the run: keys checked, values of the types that it names.

    Raises:
        TrackerError: the first of `argument_errors`.
    """
    for error in argument_errors(tracker, told):
        raise error
    types = typing.get_type_hints(tracker.__init__)
    return {key: _typed(key, value, types.get(key, Any)) for key, value in told.items()}


def argument_errors(tracker: type[Tracker], told: Mapping[str, JsonValue]) -> Iterator[TrackerError]:
    """Unknown and missing keys, and values of a wrong type."""
    known = list(inspect.signature(tracker).parameters.values())[1:]
    open_ended = any(each.kind is each.VAR_KEYWORD for each in known)
    named = {each.name: each for each in known if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    types = typing.get_type_hints(tracker.__init__)
    for key, value in told.items():
        if key not in named and not open_ended:
            takes = f"it takes {', '.join(named)}" if named else "it takes none"
            yield TrackerError(f"no such argument: {takes}{SECRETS if key in SECRET_KEYS else ''}", key)
            continue
        try:
            _typed(key, value, types.get(key, Any))
        except TrackerError as error:
            yield error
    for key, each in named.items():
        if each.default is each.empty and key not in told:
            yield TrackerError("required, and missing", key)


SECRET_KEYS = ("api_key", "login_kwargs", "key")
SECRETS = (
    "; keys of its API stand in the environment of the learner (its own login does, too), not in the configuration"
)


def _typed(key: str, value: JsonValue, wanted: Any) -> Any:
    """Raises TrackerError where the value is of another type; as strict as the configuration."""
    try:
        return TypeAdapter(wanted).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        messages = dict.fromkeys(
            each["msg"].removeprefix("Input should be ").replace("a valid ", "a ") for each in error.errors()
        )
        raise TrackerError(f"expected {' or '.join(messages)}, got {value!r}", key) from error
