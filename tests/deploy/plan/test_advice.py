"""`offbeat runs why --plan`, by the folder of a run that the real writers wrote."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from redis.asyncio import Redis as AsyncRedis
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.cluster import ray_run_factory
from offbeat.deploy.cluster.ray_run_factory import RayRunFactory
from offbeat.deploy.config.loader import dump_yaml, load_run, read_run
from offbeat.deploy.plan.advice import advise
from offbeat.deploy.plan.measurements import PlanError
from offbeat.deploy.run_folder import CLAIM, claim_id
from offbeat.services.control.run import RunRecord
from offbeat.services.errors import ControlError
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from tests.copying import replace
from tests.deploy.console.folders import write_run
from tests.deploy.plan.test_measurements import rollout_rows, step_rows

pytestmark = pytest.mark.slow
ORDER = "buffer.order=completion"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of waiting envs: episodes take 1 s, training 0.28 s of a step of 2 s."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "lake", "lake", "max_staleness=0", ORDER, kept=0)
    file = MetricsFile(folder / METRICS_FILE)
    for number, row in enumerate([*step_rows(), *rollout_rows()]):
        values = {name: Partial("last", value) for name, value in row.values.items()}
        file.write(f"{10**13 + number}-0", MetricRecord(row.source, values, row.step, dict(row.labels), row.time))
    file.flush()
    return folder


def test_the_change_that_helps_most_is_named_beside_what_was_measured(folder: Path):
    sentence = advise(folder, read_run(folder / "config.yaml").settings)
    assert "(measured 5)" in sentence
    assert "would help most: +" in sentence


def test_live_settings_are_those_that_are_simulated(folder: Path):
    """With a group in play at a time, more of them help."""
    settings = replace(read_run(folder / "config.yaml").settings, num_env_groups=1, max_staleness=4.0)
    assert "train_env_manager.num_env_groups=2 would help most" in advise(folder, settings)


def test_a_partition_which_cannot_be_set_live_is_not_advised(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "lake")
    config = tmp_path / "lake" / "config.yaml"
    changes = ("train_env_manager.num_env_groups=8", "train_env_manager.num_groups_partition=[8]")
    config.write_text(dump_yaml(load_run(config, changes)))
    run = read_run(config)
    assert run.train_env_manager.num_groups_partition == (8,)
    advice = advise(tmp_path / "lake", replace(run.settings, num_env_groups=1, max_staleness=4.0))
    assert "train_env_manager.num_env_groups=2 would help most" in advice


def test_another_latency_keeps_the_turns_that_were_measured(folder: Path):
    rates: list[float] = []
    for max_steps in (8, 200):
        words = [
            "plan",
            str(folder / "config.yaml"),
            f"custom_envs.FrozenLake.max_steps={max_steps}",
            "--from",
            str(folder),
        ]
        answer = CliRunner().invoke(app, [*words, "--env-latency", "1", "--episodes", "400", "--json"])
        assert answer.exit_code == 0, answer.output
        rates.append(json.loads(answer.stdout)["configured"]["estimate"]["trajectories_per_s"])
    assert rates[0] == pytest.approx(rates[1], rel=0.1)


def test_a_folder_on_another_machine_has_no_plan(tmp_path: Path, folder: Path):
    with pytest.raises(PlanError, match="can't be read on this machine"):
        advise(tmp_path / "elsewhere", read_run(folder / "config.yaml").settings)


async def test_a_run_of_the_mesh_is_simulated_under_its_settings_in_force(
    folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_run_factory, "ensure_reaper", lambda: None)
    config = read_run(folder / "config.yaml")
    record = RunRecord("lake", config.model_dump_json(), str(folder), 7, config.settings)
    (folder / CLAIM).write_text(claim_id(record.run_id, record.created_at))
    factory = RayRunFactory(AsyncRedis.from_url(redis_url), redis_url, folder.parent)
    settings = replace(config.settings, num_env_groups=2)
    plan = await asyncio.to_thread(factory.plan, record, settings)
    assert plan["configured"]["num_env_groups"] == 2
    assert plan["measured"]["trajectories_per_s"] == pytest.approx(5, rel=0.01)
    with pytest.raises(ControlError, match="is not on the host"):
        await asyncio.to_thread(factory.plan, replace(record, output_dir=str(folder / "elsewhere")), settings)
