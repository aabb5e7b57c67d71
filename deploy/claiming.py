"""Makes room in a run's folder where no `offbeat train` has made it: for runs that a deployed control service starts."""

from deploy import run_folder
from deploy.config import RunConfig
from deploy.loading import dump_yaml

CLAIM = ".claim"
"""Names the start of a run that the folder was made ready for."""


def claim_folder(config: RunConfig, claim: str) -> None:
    """Make room for a run that nobody has made room for: an earlier one in its folder is moved aside, unless it is resumed.

    claim: names this start of the run; the folder keeps it, so that what has been done is not done again.

    Raises:
        FolderInUseError: `offbeat train` runs a run there.
    """
    mark = config.output_dir / CLAIM
    if mark.exists() and mark.read_text() == claim:
        return
    run_folder.claim(config.output_dir, resume=bool(config.resume_from_checkpoint))
    config.output_dir.mkdir(parents=True, exist_ok=True)
    run_folder.write_config(config.output_dir, dump_yaml(config))
    mark.write_text(claim)
