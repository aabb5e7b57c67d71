"""Mistakes in a command's arguments, which end it with a line and exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import typer

EXIT_USAGE = 2


def check_target(option: str, path: Path) -> None:
    """Refuse a file that can't be written, before anything is played."""
    with writing(option, path):
        if not path.parent.is_dir():
            exit_usage(f"{option} {path}: there is no folder {path.parent}")
        if path.is_dir():
            exit_usage(f"{option} {path}: is a folder")
        TemporaryFile(dir=path.parent).close()


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        exit_usage(f"{option} {path}: can't be written: {error}")


def user_errors() -> tuple[type[Exception], ...]:
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.services.errors import GenerationError, RolloutError

    return ConfigError, GenerationError, RolloutError, ValueError


def error_text(error: Exception) -> str:
    from offbeat.deploy.config.errors import ConfigError

    if isinstance(error, ConfigError):
        return "\n".join(str(issue) for issue in error.issues)
    return str(error)


def exit_usage(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(EXIT_USAGE)
