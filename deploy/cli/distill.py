"""`offbeat distill`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.deploy.cli.config import EXIT_CONFIG, WITH_OVERRIDES, Overrides, load

if TYPE_CHECKING:
    from offbeat.deploy.config.run import RunConfig

distill_app = typer.Typer(help="Write a dataset's scores by teachers once.", no_args_is_help=True)


@distill_app.callback()
def distill() -> None:
    """Write a dataset's scores by teachers once."""


@distill_app.command("prepare", context_settings=WITH_OVERRIDES)
def prepare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's YAML file.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Write the teachers' distributions of all rows beside the dataset, for `placement: files`.

    Runs on the device of `actor_train`. Rows that are written already are scored again only if they have changed.
    """
    from offbeat.services.errors import MeshError

    loaded = load(config, overrides)
    try:
        prepare_run(loaded)
    except (MeshError, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_CONFIG) from None


def prepare_run(config: "RunConfig") -> dict[str, int]:
    """Score missing rows; return their number by role."""
    import tempfile

    import torch
    from rich.progress import Progress
    from transformers.utils.logging import disable_progress_bar

    from offbeat.deploy import run_setup
    from offbeat.trainer.config.scored_roles import scored_roles
    from offbeat.trainer.run import LearnerRun
    from offbeat.trainer.training.frozen_roles import load_scorer
    from offbeat.trainer.training.prepare_scores import open_sources, prepare_scores
    from offbeat.trainer.training.score_keys import file_key

    roles = scored_roles(config, config.reference, "files")
    if not roles:
        raise ValueError("no teacher has its scores in files: set teacher.NAME.strategy_args.placement=files")
    torch.set_num_threads(config.actor_train.num_threads)
    disable_progress_bar()  # of a model's weights, into the bars of the rows
    scored: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary, Progress() as bar:
        folder = Path(temporary) / run_setup.POLICY if config.has_policy_folder else Path(config.pretrain)
        if config.has_policy_folder:
            run_setup.write_policy(config, folder)
        run = LearnerRun(config.exp_name, "", config.output_dir, config)
        sources = list(open_sources(run, folder))
        for role in roles:
            lines = {str(path): bar.add_task(f"{role.name}: {path.name}", total=s.num_rows) for path, s in sources}
            key = file_key(run, role, folder)
            num_scored = prepare_scores(
                sources,
                role,
                key,
                load_scorer(run, role, folder),
                show=lambda path, done, total, lines=lines: bar.update(lines[path], completed=done, total=total),
            )
            scored[role.name] = num_scored or 0
            for path, source in sources:
                bar.update(lines[str(path)], completed=source.num_rows)
            total = sum(source.num_rows for _, source in sources)
            bar.print(f"{role.name}: {scored[role.name]} of {total} rows scored now, {key}")
    return scored
