"""`offbeat config import`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.areal import import_areal
from offbeat.deploy.config.importing.fitting import check_imported, find_issues
from offbeat.deploy.config.importing.prime_rl import import_prime_rl
from offbeat.deploy.config.importing.prime_rl_files import are_parts
from offbeat.deploy.config.importing.report import Imported
from offbeat.deploy.config.importing.roll import import_roll
from offbeat.deploy.config.importing.trial import describe_trial, make_trial
from offbeat.deploy.config.importing.trl import import_trl
from offbeat.deploy.config.importing.verl import import_verl
from offbeat.deploy.config.importing.writing import to_text, to_yaml

LIBRARIES: dict[str, Callable[[Path], Imported]] = {"areal": import_areal, "roll": import_roll, "verl": import_verl}
PRIME_RL = "prime-rl"


class ImportFailedError(Exception):
    """A file that can't be imported."""


def import_files(
    library: str,
    files: Sequence[Path],
    out: Path,
    *,
    force: bool,
    trial: bool,
    echo: Callable[[str], None],
    command: str | None = None,
) -> None:
    """Import files and print their reports; several files need a folder, unless they are parts of one run (prime-rl's).

    trial: with tiny models on CPUs. command: TRL's, if a file's keys do not determine it.

    Raises:
        ImportFailedError: an unreadable or unwritable file, an existing one of ours without `force`, or two files of one
            name.
    """
    if command is not None and library != "trl":
        raise ImportFailedError(f"--command names TRL's command, which files of {library} do not have: leave it out")
    runs = _group_by_run(library, files)
    if len(runs) > 1 and out.is_file():
        raise ImportFailedError(f"{out} is a file, for {len(runs)} configurations: name a folder")
    is_folder = len(runs) > 1 or out.is_dir()
    targets = [out / f"{run[0].stem}.yaml" if is_folder else out for run in runs]
    _check_distinct([run[0] for run in runs], targets)
    for target in targets:
        if target.exists() and not force:
            raise ImportFailedError(f"{target} exists already: take another name, or --force")
        if target.suffix != ".yaml":
            raise ImportFailedError(f"{target}: configurations are *.yaml files")
    for run, target in zip(runs, targets, strict=True):
        imported = _import(library, run, trial=trial, command=command)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(to_yaml(imported, library), encoding="utf-8")
        except OSError as error:
            raise ImportFailedError(f"{target} can't be written: {error}") from error
        for line in to_text(imported, str(target)):
            echo(line)


def _check_distinct(files: Sequence[Path], targets: Sequence[Path]) -> None:
    sources: dict[Path, Path] = {}
    for file, target in zip(files, targets, strict=True):
        if (other := sources.setdefault(target, file)) is not file:
            raise ImportFailedError(
                f"{other} and {file} would both be written to {target}: import them into two folders"
            )


def _group_by_run(library: str, files: Sequence[Path]) -> list[Sequence[Path]]:
    """Return the files of each run; raises `ImportFailedError` if one can't be read."""
    if missing := next((file for file in files if not file.is_file()), None):
        raise ImportFailedError(f"no such file: {missing}")
    try:
        is_one = library == PRIME_RL and are_parts(files)
    except ConfigError as error:
        raise ImportFailedError(str(error)) from error
    return [files] if is_one else [(file,) for file in files]


def _import(library: str, files: Sequence[Path], *, trial: bool, command: str | None) -> Imported:
    """Import the files of a run, of which only prime-rl's has several."""
    file = files[0]
    try:
        if library == PRIME_RL:
            imported = import_prime_rl(files)
        else:
            imported = import_trl(file, command) if library == "trl" else LIBRARIES[library](file)
    except ConfigError as error:
        raise ImportFailedError(f"{file}: {error}") from error
    if trial:
        replaced = tuple(describe_trial(imported.tree))
        tree = make_trial(imported.tree)
        imported = replace(imported, tree=tree, trial=replaced, to_do=tuple(find_issues(tree)))
    return imported if imported.to_do else imported.with_to_do(check_imported(imported.tree))
