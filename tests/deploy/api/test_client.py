"""The Python client against a real API."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.services.control.run import RunState
from tests.deploy.console.folders import write_run
from tests.paths import QUICKSTART
from tests.services.control.api_harness import api_harness
from tests.services.control.test_event_stream import served

pytestmark = pytest.mark.slow


@pytest.fixture
async def url(redis_url: str, tmp_path: Path) -> AsyncIterator[str]:
    """Of a service with two recorded runs."""
    async with api_harness(redis_url) as api, served(api) as url:
        for name in ("lake", "pond"):
            folder = write_run(tmp_path / name, name, f"seed={len(name) + (name == 'pond')}")
            await api.start(name, RunState.FINISHED, output_dir=str(folder))
        yield url


async def test_what_is_recorded_of_a_run_comes_as_tables(url: str) -> None:
    def read() -> Any:
        with offbeat.connect(url) as client:
            names = ("learner/reward", "learner/trajectories")
            return (
                client.groups("lake", limit=3),
                client.groups("lake", state=["dropped", "failed"], sort="number"),
                client.series("lake", *names),
                client.series("lake", *names, axis="trajectories"),
                client.trajectory("lake", 6, 1),
                client.compare("lake", "pond"),
            )

    groups, lost, by_step, by_trajectories, trajectory, compared = await asyncio.to_thread(read)
    assert groups["number"].tolist() == list(range(9, -1, -1))
    assert lost[["number", "reason"]].to_numpy().tolist() == [[8, "stale"], [5, "stale"], [2, "step_timeout"]]
    assert by_step["learner/reward"].to_dict() == {1.0: 0.5, 2.0: 1.0, 3.0: 1.5}
    assert by_trajectories["learner/reward"].to_dict() == {5.0: 0.5, 10.0: 1.0, 15.0: 1.5}
    assert (trajectory.step, trajectory.reward, len(trajectory.segments[0].ratio)) == (3, 1.0, 9)
    assert compared.differences["seed"] == [4, 5]


async def test_a_run_is_started_from_a_file_or_a_configuration(url: str) -> None:
    def create() -> Any:
        with offbeat.connect(url) as client:
            config = offbeat.load_config(QUICKSTART, ["exp_name=loaded"])
            with pytest.raises(ValueError, match="overrides are applied by load_config"):
                client.create(config, ["seed=2"])
            client.validate(QUICKSTART)
            return client.create(QUICKSTART, ["exp_name=file"]).id, client.create(config).id

    assert await asyncio.to_thread(create) == ("file", "loaded")


async def test_a_client_is_closed_once_however_often_it_is_asked(url: str) -> None:
    def close() -> list[threading.Thread]:
        with offbeat.connect(url) as client:
            assert client.list()
            client.close()
        client.close()
        return [thread for thread in threading.enumerate() if thread.name == "offbeat client"]

    async with asyncio.timeout(20):
        assert await asyncio.to_thread(close) == []


async def test_a_reproduction_is_waited_for(url: str) -> None:
    def reproduce() -> Any:
        with offbeat.connect(url) as client:
            return client.reproduce("lake", 2)

    assert (await asyncio.to_thread(reproduce)).state == "equal"
