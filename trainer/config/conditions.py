"""Configuration keys that count only together with others: said on the field, refused by name where they would do nothing.

    dual_clip: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=1)

A key that keeps its default is never refused, so a configuration that was written out in full can be read again.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo, field_validator

from offbeat.envs.config import Config

SET: tuple[object, ...] = ()
"""`OnlyWith(key=SET)`: any value that switches `key` on."""


class OnlyWith:
    """What other keys of the same table must be; they stand before this one."""

    def __init__(self, **needs: tuple[object, ...]) -> None:
        self.needs = needs

    def complaint(self, data: Mapping[str, Any]) -> str:
        """What keeps the key from having an effect, or nothing."""
        for key, accepted in self.needs.items():
            if key not in data or data[key] in accepted or (accepted is SET and data[key]):
                continue
            if accepted is SET or accepted == (True,):
                return f"has no effect without {key}: set {key}{'' if accepted is SET else '=true'}, or leave this out"
            wanted = " or ".join(_shown(value) for value in accepted)
            return f"has no effect with {key}={_shown(data[key])}: leave it out, or take {key}={wanted}"
        return ""


class NotWith:
    """What another key of the same table must not be; `instead` says what would be right."""

    def __init__(self, instead: str, **refused: tuple[object, ...]) -> None:
        self.instead = instead
        self.refused = refused

    def complaint(self, data: Mapping[str, Any]) -> str:
        """What keeps the key from having an effect, or nothing."""
        for key, values in self.refused.items():
            if data.get(key) in values:
                return f"has no effect with {key}={_shown(data[key])}: {self.instead}"
        return ""


class ConditionalConfig(Config):
    """A table whose fields may say `OnlyWith` and `NotWith`."""

    @field_validator("*")
    @classmethod
    def _has_an_effect(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields.get(info.field_name or "")
        if field is None or value == field.get_default(call_default_factory=True):
            return value
        for condition in field.metadata:
            if isinstance(condition, OnlyWith | NotWith) and (complaint := condition.complaint(info.data)):
                raise ValueError(complaint)
        return value


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
