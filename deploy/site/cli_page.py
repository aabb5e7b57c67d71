"""Page of the command line."""

from collections.abc import Iterator
from inspect import cleandoc

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from offbeat.deploy.cli.app import app
from offbeat.deploy.site.markdown import cell, table

HEAD = """# Command line

Generated from the commands. `offbeat COMMAND --help` prints the same; exit codes are in [REST and `offbeat
runs`](../rest.md#from-the-command-line) and [Learner](../learner.md#exit-codes).
"""


def cli_page() -> str:
    return "\n".join([HEAD, *(_section(path, command) for path, command in all_commands())])


def all_commands() -> Iterator[tuple[str, TyperCommand]]:
    yield from _walk("offbeat", typer.main.get_command(app))


def _walk(path: str, command: object) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _walk(f"{path} {name}", inner)
    elif isinstance(command, TyperCommand) and not command.hidden:
        yield path, command


def _section(path: str, command: TyperCommand) -> str:
    context = typer.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    text = f"## {path}\n\n{cleandoc(command.help or '')}\n\n```text\n{usage}\n```\n"
    return text + (f"\n{table(['', 'Meaning', 'Default'], rows)}" if rows else "")


def _row(parameter: object) -> list[str]:
    if isinstance(parameter, TyperArgument):
        name, about = parameter.metavar or str(parameter.name).upper(), parameter.help
    elif isinstance(parameter, TyperOption):
        name, about = ", ".join(parameter.opts), parameter.help
    else:
        raise TypeError(f"{parameter!r} is neither an argument nor an option")
    default = parameter.default
    shown = parameter.show_default is not False and default not in (None, False, ()) and not callable(default)
    return [f"`{name}`", cell(about or ""), f"`{getattr(default, 'value', default)}`" if shown else ""]
