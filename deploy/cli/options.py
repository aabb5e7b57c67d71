"""Options that a command's arguments leave without effect."""

import typer


def refuse_unread(context: typer.Context, reason: str, *names: str) -> None:
    """Refuse options of the command line that are not read, but not their variables; raises `BadParameter`.

    names: of the function's parameters.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(reason, param_hint=option.opts[0])
