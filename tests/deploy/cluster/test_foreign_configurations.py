"""Active runs whose configuration this build can't read: not reconciled, but stopped and deleted on request."""

import json
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy.cluster.run_factory import MeshRunFactory, RunComponents
from offbeat.deploy.config.loader import canonical_tree, compose_tree, validate_tree
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.run import BusyError, DesiredState, ForeignRecordError, RunRecord, RunSpec, RunState
from offbeat.services.control.store import RunStore
from tests.copying import replace
from tests.paths import QUICKSTART


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RunStore]:
    async with AsyncRedis.from_url(redis_url) as redis:
        yield RunStore(redis, orphaned_after_s=math.inf)


@pytest.fixture
def factory(store: RunStore, redis_url: str, tmp_path: Path) -> MeshRunFactory:
    return MeshRunFactory(store.redis, redis_url, tmp_path)


def spec_with(folder: Path, **keys: Any) -> RunSpec:
    config = validate_tree(canonical_tree(compose_tree(QUICKSTART, [f"output_dir={folder}"])))
    spec = run_spec(config)
    return replace(spec, config=json.dumps({**json.loads(spec.config), **keys}))


def record_of(spec: RunSpec, **fields: Any) -> RunRecord:
    return RunRecord(spec.run_id, spec.config, spec.output_dir, spec.max_steps, spec.settings, **fields)


def test_a_run_that_ends_is_found_without_keys_of_another_version(factory: MeshRunFactory, tmp_path: Path):
    spec = spec_with(tmp_path / "run", key_of_another_version=1)
    with pytest.raises(ForeignRecordError, match=r"another version of Offbeat \(key_of_another_version: Extra inputs"):
        factory.build_mesh(record_of(spec))
    assert isinstance(factory.build_mesh(record_of(spec, wanted=DesiredState.STOPPED)), RunComponents)


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.DRAINING])
async def test_an_unreadable_run_is_stopped_and_deleted(
    store: RunStore, factory: MeshRunFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture, state: RunState
):
    spec, other = (replace(spec_with(tmp_path / "run", seed="many"), run_id=run_id) for run_id in ("old", "new"))
    await store.create(spec)
    await store.update("old", state=RunState.RUNNING)
    reconciler = Reconciler(store, factory.build_mesh, reconcile_s=0.01)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            await reconciler._try_reconcile("old")
    (said,) = (each.message for each in caplog.records if each.name.startswith("offbeat.services.control"))
    assert "seed: " in said, "once, not in each pass"
    assert (await store.load("old")).state is RunState.RUNNING
    with pytest.raises(BusyError):
        await store.create(other)
    await store.want("old", DesiredState.STOPPED)
    await store.update("old", state=state, outcome=RunState.STOPPED)
    assert await reconciler.reconcile("old") is RunState.STOPPED
    record = await store.load("old")
    assert (record.state, record.ended_at > 0) == (RunState.STOPPED, True)
    assert "seed: " in record.error
    await store.delete("old")
    await store.create(other)
