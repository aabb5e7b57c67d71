"""Rejection of keys without effect, by conditions on the field.

    dual_clip: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=1)

Defaults are never rejected, so that resolved configurations can be loaded.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo, field_validator

from offbeat.envs.config import Config

SET: tuple[object, ...] = ()
"""Any truthy value."""


class OnlyWith:
    """Required values of keys declared earlier in the table."""

    def __init__(self, **needs: tuple[object, ...]) -> None:
        self.needs = needs

    def find_conflict(self, data: Mapping[str, Any]) -> str:
        """Return the error message, or ""."""
        for key, accepted in self.needs.items():
            if key not in data or data[key] in accepted or (accepted is SET and data[key]):
                continue
            if accepted is SET or (len(accepted) == 1 and accepted[0] is True):
                return f"has no effect without {key}: set {key}{'' if accepted is SET else '=true'}, or leave this out"
            required = " or ".join(_format(value) for value in accepted)
            return f"has no effect with {key}={_format(data[key])}: leave it out, or take {key}={required}"
        return ""


class OnlyWithAny(OnlyWith):
    """Required values of keys declared earlier, of which one suffices."""

    def find_conflict(self, data: Mapping[str, Any]) -> str:
        """Return the error message, or ""."""
        conflicts = [OnlyWith(**{key: accepted}).find_conflict(data) for key, accepted in self.needs.items()]
        return conflicts[0] if all(conflicts) else ""


class NotWith:
    """Excluded values of another key of the table. instead: remedy."""

    def __init__(self, instead: str, **excluded: tuple[object, ...]) -> None:
        self.instead = instead
        self.excluded = excluded

    def find_conflict(self, data: Mapping[str, Any]) -> str:
        """Return the error message, or ""."""
        for key, values in self.excluded.items():
            if data.get(key) in values:
                return f"has no effect with {key}={_format(data[key])}: {self.instead}"
        return ""


class ConditionalConfig(Config):
    @field_validator("*")
    @classmethod
    def _has_an_effect(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields.get(info.field_name or "")
        default = None if field is None else field.get_default(call_default_factory=True)
        if field is None or value == default or (default is None and not value):  # None resolved to "off"
            return value
        for condition in field.metadata:
            if isinstance(condition, OnlyWith | NotWith) and (conflict := condition.find_conflict(info.data)):
                raise ValueError(conflict)
        return value


def _format(value: object) -> str:
    """Return a value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
