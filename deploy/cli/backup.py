"""`offbeat backup` and `offbeat restore`."""

import shlex
from pathlib import Path
from typing import Annotated, NoReturn

import typer

EXIT_CONFIG = 2
MIB = 1 << 20

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis", metavar="URL", envvar="OFFBEAT_REDIS", help="A URL, or a file with one.", show_default=False
    ),
]


def backup(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="New file.", show_default=False)],
    redis: RedisUrl = None,
) -> None:
    """Write a run's folder and its Redis keys to a file, also while it trains.

    --redis: by default the Redis of RUN's configuration or folder, or of runs/redis/url.
    """
    from offbeat.deploy.backup.backup import back_up
    from offbeat.deploy.cli.audit import AuditError, find_folder
    from offbeat.deploy.config.loader import read_run
    from offbeat.deploy.run_folder import CONFIG

    try:
        folder = find_folder(run)
        done = back_up(folder, read_run(folder / CONFIG), out, redis)
    except _errors(AuditError) as error:
        _refuse(error)
    newest = f"newest checkpoint: step {done.step}" if done.step else "no checkpoint"
    size = f"{done.size / MIB:.1f} MiB"
    typer.echo(f"wrote {out}, {size}: {done.num_keys} Redis keys and {done.num_files} files; {newest}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of `offbeat backup`.", show_default=False)],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="New folder.", show_default="the run's original one"),
    ] = None,
    redis: RedisUrl = None,
) -> None:
    """Restore a run from a file, as a stopped one.

    --redis: of a mesh; by default the keys are restored for `offbeat train`, in the run's folder.
    """
    from offbeat.deploy.backup.restore import restore as restore_backup

    try:
        done = restore_backup(file, to, redis)
    except _errors() as error:
        _refuse(error)
    typer.echo(f"restored run {done.contents.run_id} to {done.folder}, with {done.num_keys} Redis keys")
    config, folder = (shlex.quote(str(path)) for path in (done.folder / "config.yaml", done.folder))
    command = f"train {config}" if done.redis_url is None else f"runs start {config} output_dir={folder}"
    typer.echo(f"Resume with: offbeat {command} resume_from_checkpoint=true")


def _errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    from offbeat.deploy.backup.errors import BackupError
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.services.errors import MeshError

    return (BackupError, ConfigError, MeshError, RedisError, OSError, *more)


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"offbeat: {error}", err=True)
    raise typer.Exit(EXIT_CONFIG) from None
