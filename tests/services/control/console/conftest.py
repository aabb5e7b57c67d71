"""A run whose folder the real writers wrote, behind the API and a real Redis."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.deploy.console.folders import write_run
from tests.services.control.api_harness import ApiHarness, api_harness


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "lake")
    write_run(folder / "pond", "pond", "seed=7")
    return folder


@pytest.fixture
async def api(redis_url: str, runs: Path) -> AsyncIterator[ApiHarness]:
    async with api_harness(redis_url) as harness:
        for name in ("lake", "pond"):
            await harness.start(name, output_dir=str(runs / name), actor_infer={"app": "own", "num_replicas": 2})
        yield harness
