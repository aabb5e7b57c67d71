"""Parts of commands that are refused in their turn, because a client can't skip a place in its sequence."""

from pydantic import TypeAdapter, ValidationError

from offbeat.services.tinker.records import OptimStep, RefusedCommand
from offbeat.services.tinker.schemas import AdamBody, Name

NAME: TypeAdapter[str] = TypeAdapter(Name)


def refuse_name(name: str) -> RefusedCommand | None:
    """Return the refusal of a checkpoint's name, if it is no folder's."""
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
