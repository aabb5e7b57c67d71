from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.run_setup import make_log_folder, worker_settings
from tests.paths import QUICKSTART


def test_logging_dir_holds_the_logs_and_the_run_links_to_it(tmp_path: Path):
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}/run", f"logging_dir={tmp_path}/logs/quickstart"])
    for _ in range(2):
        (make_log_folder(config) / "learner.log").write_text("here")
    assert (tmp_path / "logs" / "quickstart" / "learner.log").read_text() == "here"
    assert (tmp_path / "run" / "logs").is_symlink()


@pytest.mark.parametrize("logging_dir", [None, "{run}/logs"])
def test_logs_are_in_the_run_by_default(logging_dir: str | None, tmp_path: Path):
    run = tmp_path / "run"
    more = [f"logging_dir={logging_dir.format(run=run)}"] if logging_dir else []
    logs = make_log_folder(load_run(QUICKSTART, [f"output_dir={run}", *more]))
    assert (logs, logs.is_symlink(), logs.is_dir()) == (run / "logs", False, True)


def test_system_envs_reach_the_workers_as_text():
    config = load_run(QUICKSTART, ["+system_envs={USE_MODELSCOPE: 1, DEBUG: true, NAME: x}"])
    expected = {"USE_MODELSCOPE": "1", "DEBUG": "true", "NAME": "x"}
    assert worker_settings(config, "redis://127.0.0.1:1/0").environment == config.environment == expected
