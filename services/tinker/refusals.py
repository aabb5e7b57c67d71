"""Validation of a command's fields; an invalid one becomes a `RefusedCommand`."""

import json
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from offbeat.services.tinker.errors import TinkerError
from offbeat.services.tinker.records import OptimStep, RefusedCommand
from offbeat.services.tinker.schemas import AdamBody, Name

MAX_METADATA_BYTES = 64 << 10
MAX_TTL_S = 10 * 365 * 24 * 3600
NAME: TypeAdapter[str] = TypeAdapter(Name)


def refuse_name(name: str) -> RefusedCommand | None:
    try:
        NAME.validate_python(name)
    except ValidationError:
        return RefusedCommand(
            f"a checkpoint can't be called {name[:200]!r}: take up to 128 letters, digits and . _ - + ="
        )
    return None


def refuse_metadata(metadata: Mapping[str, object] | None) -> RefusedCommand | None:
    size = len(json.dumps(metadata))
    if size <= MAX_METADATA_BYTES:
        return None
    return RefusedCommand(f"user_metadata has {size} bytes: at most {MAX_METADATA_BYTES} are kept")


def check_metadata(metadata: Mapping[str, object] | None) -> None:
    """Raise TinkerError unless it is small."""
    if (refused := refuse_metadata(metadata)) is not None:
        raise TinkerError(refused.error)


def refuse_ttl(ttl_seconds: int | None) -> RefusedCommand | None:
    if ttl_seconds is None or 1 <= ttl_seconds <= MAX_TTL_S:
        return None
    return RefusedCommand(f"ttl_seconds: {ttl_seconds}: 1 to {MAX_TTL_S} (ten years) are possible, or none: no expiry")


def check_ttl(ttl_seconds: int | None) -> None:
    """Raise TinkerError unless it is possible."""
    if (refused := refuse_ttl(ttl_seconds)) is not None:
        raise TinkerError(refused.error)


def read_adam(params: dict[str, object]) -> OptimStep | RefusedCommand:
    try:
        return OptimStep(**AdamBody.model_validate(params).model_dump())
    except ValidationError as error:
        first = error.errors()[0]
        return RefusedCommand(f"adam_params.{'.'.join(map(str, first['loc']))}: {first['msg']}")
