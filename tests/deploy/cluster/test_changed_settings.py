"""Changes of a run's live settings, checked against its configuration."""

from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy.cluster.live_values import set_values, to_overrides
from offbeat.deploy.cluster.run_factory import MeshRunFactory
from offbeat.deploy.config.loader import validate_tree
from offbeat.deploy.config.saving import to_saved_tree
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.run import RunRecord
from offbeat.services.control.service import InvalidRunError

ENV: dict[str, Any] = {"env_type": "frozen_lake"}
SHARES = {
    "custom_envs": {"L": ENV, "M": ENV},
    "train_env_manager": {"tags": ["L", "M"], "num_groups_partition": [8, 8], "num_env_groups": 16},
    "actor_train": {"training_args": {"learning_rate": 1e-3, "lr_scheduler_type": "polynomial"}},
}


@pytest.fixture
async def factory(redis_url: str, tmp_path: Path) -> AsyncIterator[MeshRunFactory]:
    async with AsyncRedis.from_url(redis_url) as redis:
        yield MeshRunFactory(redis, redis_url, tmp_path)


async def refusals(
    factory: MeshRunFactory, tree: dict[str, Any], values: dict[str, float], **moved: float
) -> list[str]:
    """moved: settings that differ from the configuration, by an earlier change or the staleness controller."""
    config = validate_tree({"rollout_batch_size": 16, **tree})
    spec = run_spec(config)
    record = RunRecord(spec.run_id, spec.config, spec.output_dir, spec.max_steps, spec.settings)
    requested = type(spec.settings)(**{**asdict(spec.settings), **moved})
    try:
        await factory.validate_change(record, requested, values)
    except InvalidRunError as error:
        return [problem.path for problem in error.problems]
    return []


async def test_a_partition_stays_the_shares_of_another_number_of_groups(factory: MeshRunFactory) -> None:
    assert await refusals(factory, SHARES, {"num_env_groups": 24}) == []
    assert await refusals(factory, SHARES, {"num_env_groups": 1}) == ["train_env_manager.num_env_groups"]


async def test_a_change_is_checked_after_the_number_of_groups_was_moved(factory: MeshRunFactory) -> None:
    rate = {"learning_rate": 1e-8}
    at_first, moved = await refusals(factory, SHARES, rate), await refusals(factory, SHARES, rate, num_env_groups=8)
    assert at_first == moved != []


async def test_a_change_is_checked_if_the_settings_in_force_are_invalid(factory: MeshRunFactory) -> None:
    assert await refusals(factory, SHARES, {"learning_rate": 1e-8}, max_staleness=-1.0) == ["max_staleness"]


async def test_staleness_is_lowered_below_the_steps_between_published_versions(factory: MeshRunFactory) -> None:
    """The learner then publishes the steps that the bound would not admit otherwise."""
    tree = {"custom_envs": {"L": ENV}, "model_update_frequency": 4, "max_staleness": 3.0}
    assert await refusals(factory, tree, {"max_staleness": 1.0}) == []


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "of an earlier build"])
async def test_a_temperature_of_the_manager_is_changed_in_both_tables(factory: MeshRunFactory, saved: bool) -> None:
    manager = {"generating_args": {"temperature": 0.6}}
    tree = {"custom_envs": {"L": ENV}, "train_env_manager": manager, "rollout_batch_size": 16}
    config = validate_tree(tree)
    record = to_saved_tree(config) if saved else config.model_dump(mode="json")
    changed = validate_tree(set_values(record, {"temperature": 0.8}))
    assert (changed.temperature, changed.train_env_manager.generating_args.temperature) == (0.8, 0.8)
    assert to_overrides(record, {"temperature": 0.8}) == [
        "actor_infer.generating_args.temperature=0.8",
        "train_env_manager.generating_args.temperature=0.8",
    ]
    assert await refusals(factory, tree, {"temperature": 0.8}) == []
