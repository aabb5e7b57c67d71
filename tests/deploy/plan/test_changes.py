"""What a plan advises can be set as it is written."""

import pytest

from offbeat.deploy.config.loader import load_run, read_run
from offbeat.deploy.plan.changes import single_changes
from offbeat.deploy.plan.plan import per_worker_of, setup_of
from tests.deploy.plan.settings import measures_of
from tests.paths import QUICKSTART

TWO_TAGS = "custom_envs.Other={env_type: frozen_lake}"


@pytest.mark.parametrize("partition", ["[]", "[5,3]"])
def test_more_groups_are_advised_with_their_shares_of_the_tags(partition: str):
    tags = list(load_run(QUICKSTART).custom_envs)
    own = [
        TWO_TAGS,
        f"train_env_manager.tags=[{tags[0]},Other]",
        "train_env_manager.num_env_groups=8",
        f"train_env_manager.num_groups_partition={partition}",
    ]
    config = load_run(QUICKSTART, own)
    changes = [change.text for change in single_changes(setup_of(config), measures_of(), per_worker_of(config))]
    (advised,) = [text for text in changes if "num_env_groups" in text]
    assert ("num_groups_partition=[8,4]" in advised) == (partition != "[]")
    changed = load_run(QUICKSTART, [*own, *advised.split()]).train_env_manager
    assert changed.num_env_groups == 12


def test_an_engine_more_is_no_setting_where_devices_are_mapped():
    """`device_mapping` implies the engines: `num_replicas` beside it is refused."""
    measures = measures_of(turn_s="1:.1,10:.5")
    devices = ["actor_infer.device=cuda", "actor_train.device=cuda"]
    mapped = ["actor_infer.device_mapping=[0,1]", "actor_train.device_mapping=[2]"]
    for overrides, is_setting in ((devices, True), ([*devices, *mapped], False)):
        config = read_run(QUICKSTART, overrides)
        changes = list(single_changes(setup_of(config), measures, per_worker_of(config)))
        (engine,) = [change for change in changes if change.setup.num_replicas > config.actor_infer.num_replicas]
        assert engine.is_setting == is_setting, engine.text
        assert ("device_mapping" in engine.text) == (not is_setting)
        for change in changes:
            if change.is_setting:
                read_run(QUICKSTART, [*overrides, *change.text.split()])
