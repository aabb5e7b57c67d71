"""Validation of a command's fields; an invalid one becomes a `RefusedCommand`."""

from pydantic import TypeAdapter, ValidationError

from offbeat.services.tinker.records import OptimStep, RefusedCommand
from offbeat.services.tinker.schemas import AdamBody, Name

NAME: TypeAdapter[str] = TypeAdapter(Name)


def refuse_name(name: str) -> RefusedCommand | None:
    try:
        NAME.validate_python(name)
    except ValidationError:
        return RefusedCommand(
            f"a checkpoint can't be called {name[:200]!r}: take up to 128 letters, digits and . _ - + ="
        )
    return None


def read_adam(params: dict[str, object]) -> OptimStep | RefusedCommand:
    try:
        return OptimStep(**AdamBody.model_validate(params).model_dump())
    except ValidationError as error:
        first = error.errors()[0]
        return RefusedCommand(f"adam_params.{'.'.join(map(str, first['loc']))}: {first['msg']}")
