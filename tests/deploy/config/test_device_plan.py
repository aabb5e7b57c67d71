"""Devices of engines and learner on a cluster."""

import re
from typing import Any

import pytest

from offbeat.deploy.config.device_plan import ClusterNode, DevicePlan, LearnerNode, plan_devices
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import canonical_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import choose_turns, with_utilization
from offbeat.services.devices import EngineDevices
from offbeat.services.generation.config import app_name
from offbeat.trainer.engines.node_ranks import encode_ranks

ONE_GPU = [ClusterNode("a", "10.0.0.1", 1)]
TWO_NODES = [ClusterNode("b", "10.0.0.2", 4), ClusterNode("a", "10.0.0.1", 4)]
CUDA = {"device": "cuda"}


def config(train: dict[str, Any] | None = None, infer: dict[str, Any] | None = None, **keys: Any) -> RunConfig:
    train, infer = CUDA if train is None else CUDA | train, CUDA if infer is None else CUDA | infer
    tree = {"custom_envs": {"A": {"env_type": "frozen_lake"}}, "actor_train": train, "actor_infer": infer, **keys}
    return validate_tree(canonical_tree(tree))


def issues(config: RunConfig, nodes: list[ClusterNode]) -> dict[str, str]:
    return {issue.path: issue.message for issue in plan_devices(config, nodes).issues}


def engine(size: int, **keys: Any) -> dict[str, Any]:
    return {"strategy_args": {"strategy_config": {"tensor_parallel_size": size}}, **keys}


def test_engine_and_learner_share_the_only_gpu() -> None:
    plan = plan_devices(config(), ONE_GPU)
    slot = EngineDevices("a", (0,), is_shared=True)
    assert plan == DevicePlan((slot,), (LearnerNode("a", 1, (0,), 0),), {}, is_shared=True)
    assert with_utilization(config(), plan).engine.gpu_memory_utilization == 0.45


def test_synchronous_runs_on_shared_devices_take_turns() -> None:
    synchronous = config(max_staleness=0)
    shared = choose_turns(synchronous, ONE_GPU)
    assert shared.takes_turns
    assert with_utilization(shared, plan_devices(shared, ONE_GPU)).engine.gpu_memory_utilization == 0.85
    assert choose_turns(config(), ONE_GPU) == config()
    assert choose_turns(synchronous, TWO_NODES) == synchronous
    refused = config(None, {"strategy_args": {"strategy_config": {"enable_sleep_mode": False}}}, max_staleness=0)
    assert choose_turns(refused, ONE_GPU) == refused


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_of_several_engines_those_on_the_learners_devices_sleep(max_staleness: int) -> None:
    run = choose_turns(
        config({"device_mapping": [1]}, {"device_mapping": [0, 1]}, max_staleness=max_staleness), TWO_NODES
    )
    plan = plan_devices(run, TWO_NODES)
    assert [(slot.devices, slot.is_shared) for slot in plan.engines] == [((0,), False), ((1,), True)]
    assert run.takes_turns
    assert with_utilization(run, plan).engine.gpu_memory_utilization == 0.85


def test_asynchronous_runs_without_other_engines_stay_in_memory() -> None:
    both = config({"device_mapping": [0, 1]}, {"device_mapping": [0, 1]}, max_staleness=1)
    assert choose_turns(both, TWO_NODES) == both


def test_separate_devices_are_left_to_ray_and_keep_the_memory() -> None:
    plan = plan_devices(config(), TWO_NODES)
    assert plan == DevicePlan()
    assert with_utilization(config(), plan).engine.gpu_memory_utilization == 0.85


def test_devices_are_numbered_by_the_nodes_addresses() -> None:
    run = config({"device_mapping": "list(range(2, 6))"}, engine(2, device_mapping=[6, 7, 0, 1]))
    assert run.actor_train.num_processes == 4
    assert run.actor_infer.num_replicas == 2
    plan = plan_devices(run, TWO_NODES)
    assert plan.engines == (EngineDevices("a", (0, 1)), EngineDevices("b", (2, 3)))
    assert plan.learner == (LearnerNode("a", 2, (2, 3), 2), LearnerNode("b", 2, (0, 1), 2))
    assert plan == plan_devices(run, TWO_NODES[::-1])


def test_a_role_without_a_mapping_takes_what_another_leaves() -> None:
    plan = plan_devices(config({"device_mapping": [0]}, {"num_replicas": 2}), [ClusterNode("a", "10.0.0.1", 3)])
    assert plan.engines == (EngineDevices("a", (1,)), EngineDevices("a", (2,)))
    assert not plan.is_shared
    plan = plan_devices(config({"num_processes": 2}, {"device_mapping": [0, 1]}), TWO_NODES)
    assert plan.learner == (LearnerNode("a", 2, (2, 3), 2),)


def scored(replicas: int = 1, mapping: list[int] | None = None) -> dict[str, Any]:
    """Keys of a run with a scoring service."""
    reference = {"strategy_args": {"placement": "service", "num_replicas": replicas}, "device_mapping": mapping}
    return {"add_token_level_kl": True, "init_kl_coef": 0.1, "reference": reference}


def test_a_scoring_service_shares_no_device() -> None:
    plan = plan_devices(config(**scored()), [ClusterNode("a", "10.0.0.1", 2)])
    assert plan.engines == (EngineDevices("a", (0,), is_shared=True),)
    assert plan.learner == (LearnerNode("a", 1, (0,), 0),)
    assert plan.scorers == {"reference": (EngineDevices("a", (1,)),)}
    assert plan_devices(config(**scored()), TWO_NODES) == DevicePlan()
    message = issues(config(**scored()), ONE_GPU)["reference.strategy_args.num_replicas"]
    needed = "reference need 1 GPU(s) of their own, beside 1 of engines and learner"
    assert message == f"{needed}; there are 1 device(s) (1 on 1 nodes)"


def test_a_scoring_service_has_devices_of_its_own() -> None:
    plan = plan_devices(config(**scored(2, [0, 5])), TWO_NODES)
    assert plan.scorers == {"reference": (EngineDevices("a", (0,)), EngineDevices("b", (1,)))}
    assert plan.engines == (EngineDevices("a", (1,)),)
    assert "disagree" in issues(config(**scored(1, [0, 5])), TWO_NODES)["reference.device_mapping"]
    taken = config({"device_mapping": [0]}, **scored(1, [0]))
    assert "device 0 has another role" in issues(taken, TWO_NODES)["reference.device_mapping"]


def test_the_smallest_overlap_is_taken() -> None:
    plan = plan_devices(config({"num_processes": 2}, {"num_replicas": 3}), TWO_NODES[:1])
    assert plan.engines == (EngineDevices("b", (0,)), EngineDevices("b", (1,)), EngineDevices("b", (2,), True))
    assert plan.learner == (LearnerNode("b", 2, (2, 3), 1),)
    assert plan.is_shared


def test_a_learner_beyond_one_node_is_spread_by_node() -> None:
    plan = plan_devices(config({"num_processes": 6}), TWO_NODES)
    assert [(part.node_id, part.num_ranks) for part in plan.learner] == [("a", 3), ("b", 3)]
    assert plan.engines == (EngineDevices("a", (0,)),)
    assert not plan.is_shared


def test_num_gpus_per_node_sizes_the_nodes() -> None:
    run = config({"device_mapping": [2, 3]}, {"device_mapping": [0]}, num_gpus_per_node=2)
    assert plan_devices(run, TWO_NODES).learner == (LearnerNode("b", 2, (0, 1), 2),)
    assert issues(run, TWO_NODES[:1]) == {
        "actor_train.device_mapping": "device 3 does not exist: there are 2 device(s) (2 on 1 nodes), numbered from 0 to 1"
    }
    big = config({"device_mapping": [0]}, num_gpus_per_node=8)
    assert "the largest has 4" in issues(big, TWO_NODES)["num_gpus_per_node"]


def test_a_learner_on_cpus_is_spread_by_num_gpus_per_node() -> None:
    run = config({"device": "cpu", "num_processes": 3}, {"device": "cpu"}, num_gpus_per_node=2)
    plan = plan_devices(run, TWO_NODES)
    assert plan.learner == (LearnerNode("a", 2), LearnerNode("b", 1))
    assert "need 2 nodes, there are 1" in issues(run, TWO_NODES[:1])["actor_train.num_processes"]


@pytest.mark.parametrize(
    ("run", "path", "says"),
    [
        (config({"num_processes": 9}), "actor_train.num_processes", "9 process(es) need a device each, there are 8"),
        (config(infer={"num_replicas": 9}), "actor_infer.num_replicas", "need 9, there are 8 device(s) (4 + 4 on 2"),
        (config(infer=engine(8)), "actor_infer.strategy_args.strategy_config.tensor_parallel_size", "largest has 4"),
        (config(infer=engine(3, num_replicas=3)), "actor_infer.num_replicas", "3 engine(s) of 3 device(s) need 9"),
        (config({"device_mapping": [7, 8]}), "actor_train.device_mapping", "device 8 does not exist"),
        (
            config(infer=engine(2, device_mapping=[3, 4])),
            "actor_infer.device_mapping",
            "replica 0 takes devices [3, 4]",
        ),
        (config(reference={"device_mapping": [9]}), "reference.device_mapping", "device 9 does not exist"),
    ],
)
def test_what_fits_nowhere_is_reported_with_numbers(run: RunConfig, path: str, says: str) -> None:
    assert says in issues(run, TWO_NODES)[path]


def test_a_machine_without_gpu_asks_for_cpu() -> None:
    assert issues(config(), [ClusterNode("a", "10.0.0.1", 0)]).keys() == {"actor_infer.device", "actor_train.device"}


def test_a_learner_that_users_attach_is_not_placed() -> None:
    run = config({"num_processes": 9}, {"device": "cpu"}, control={"learner": "external"}, num_gpus_per_node=8)
    assert plan_devices(run, ONE_GPU) == DevicePlan()


def test_an_engine_of_the_deploy_file_needs_no_device_of_the_run() -> None:
    run = config(infer={"app": "generation-8b", "num_replicas": 9})
    assert plan_devices(run, ONE_GPU, owns_engines=run.actor_infer.app == app_name(run.exp_name)) == DevicePlan()


def critic(**keys: Any) -> dict[str, Any]:
    return {"adv_estimator": "gae", "reward_normalization": {"method": "identity"}, "critic": keys}


def test_a_critic_has_devices_of_its_own_among_the_learners_ranks() -> None:
    """Device 1 of each node; the learner has device 0 of each, the engine the others."""
    run = config({"device_mapping": [0, 4]}, {"device_mapping": [2, 3]}, **critic(device_mapping=[1, 5]))
    assert (run.critic.num_processes, run.num_critic_processes) == (2, 2)
    nodes = (LearnerNode("a", 2, (0, 1), 2, 1), LearnerNode("b", 2, (0, 1), 2, 1))
    assert plan_devices(run, TWO_NODES).learner == nodes
    assert encode_ranks(node.ranks for node in nodes) == "1+1,1+1"
    assert RunConfig.model_validate_json(run.model_dump_json()) == run
    in_learner = config({"device_mapping": [0, 4]}, {"device_mapping": [2, 3]}, **critic(device_mapping=[0, 4]))
    assert in_learner.num_critic_processes == 0


def test_a_critic_without_mapping_takes_free_devices() -> None:
    run = config({}, {"device_mapping": [0, 1]}, **critic(num_processes=1))
    plan = plan_devices(run, [ClusterNode("a", "10.0.0.1", 4)])
    assert plan.learner == (LearnerNode("a", 2, (2, 3), 2, 1),)
    assert plan_devices(config(**critic(num_processes=1)), TWO_NODES) == DevicePlan()
    on_cpu = config({"device": "cpu"}, {"device": "cpu"}, num_gpus_per_node=1, **critic(num_processes=1))
    nodes = plan_devices(on_cpu, TWO_NODES).learner
    assert nodes == (LearnerNode("a", 1), LearnerNode("b", 1, num_critics=1))
    assert "2 process(es), 1 to a node" in issues(on_cpu, ONE_GPU)["actor_train.num_processes"]


def test_a_critic_shares_none_of_its_devices() -> None:
    problem = issues(config(**critic(num_processes=1)), ONE_GPU)["critic.num_processes"]
    assert problem.startswith("critic need 1 GPU(s) of their own, beside 1 of engines and learner")
    run = config({"device_mapping": [0, 1]}, {"device_mapping": [2]}, **critic(device_mapping=[1]))
    assert (
        issues(run, TWO_NODES)["critic.device_mapping"]
        == "device 1 has another role, and critic shares none of its own"
    )
    with pytest.raises(ConfigError, match=r"2 process\(es\) disagree with device_mapping of 1 device"):
        config(**critic(device_mapping=[1], num_processes=2))
    with pytest.raises(ConfigError, match=r"1 process\(es\) disagree with the devices of actor_train"):
        config({"device_mapping": [1]}, **critic(device_mapping=[1], num_processes=1))


@pytest.mark.parametrize(
    ("train", "infer", "says"),
    [
        ({"device_mapping": [0, 1], "num_processes": 3}, None, "3 process\\(es\\) disagree with device_mapping of 2"),
        (None, {"device_mapping": [0, 1], "num_replicas": 1}, "which implies 2"),
        (None, engine(2, device_mapping=[0, 1, 2]), "3 device\\(s\\) are no multiple of 2"),
        ({"device_mapping": "eval('1')"}, None, "is not a list of device numbers"),
    ],
)
def test_counts_must_agree_with_the_mapping(
    train: dict[str, Any] | None, infer: dict[str, Any] | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        config(train, infer)


def test_a_saved_configuration_keeps_its_meaning() -> None:
    run = config({"device_mapping": "list(range(0,2))"}, engine(2, device_mapping=[0, 1]))
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


TENSOR_PARALLEL = "strategy_args.strategy_config.tensor_parallel_size"


def rewarded(size: int = 2, **keys: Any) -> dict[str, Any]:
    """Keys of a run with a judge of `size` devices, after a reward without a device."""
    judge = {
        "name": "judge",
        "kind": "llm_judge",
        "model_args": {"model_name_or_path": "judge"},
        "device": "cuda",
        **keys,
    }
    judge |= {"strategy_args": {"strategy_config": {"tensor_parallel_size": size}}}
    return {"pipeline": "rlvr", "rewards": [{"name": "answer", "kind": "math_rule"}, judge]}


def test_rewards_have_devices_of_their_own() -> None:
    plan = plan_devices(config(**rewarded(device_mapping=[2, 3, 4, 5])), TWO_NODES)
    assert plan.scorers == {"rewards.1": (EngineDevices("a", (2, 3)), EngineDevices("b", (0, 1)))}
    beside = plan_devices(config(infer={"device_mapping": [0]}, **rewarded(num_replicas=2)), [TWO_NODES[0], *ONE_GPU])
    assert beside.scorers == {"rewards.1": (EngineDevices("b", (0, 1)), EngineDevices("b", (2, 3)))}
    assert plan_devices(config(**rewarded()), TWO_NODES) == DevicePlan()


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        (rewarded(8), f"rewards.1.{TENSOR_PARALLEL}", "8 devices fits no node: the largest has 4"),
        (rewarded(4, num_replicas=2), "rewards.1.num_replicas", "need 8 GPU(s) of their own, beside 1"),
        (rewarded(device_mapping=[3, 4]), "rewards.1.device_mapping", "replica 0 takes devices [3, 4] of several"),
        (rewarded(device_mapping=[6, 8]), "rewards.1.device_mapping", "device 8 does not exist"),
        (rewarded(device_mapping=[0, 1]) | {"actor_infer": {"device_mapping": [1]}}, "rewards.1.device_mapping",
         "device 1 has another role"),
    ],
)  # fmt: skip
def test_rewards_that_fit_nowhere_are_reported_with_numbers(keys: dict[str, Any], key: str, says: str) -> None:
    keys = dict(keys)
    assert says in issues(config(infer=keys.pop("actor_infer", None), **keys), TWO_NODES)[key]


def test_roles_that_mappings_leave_no_whole_node_are_reported() -> None:
    """There are devices enough in number, but none of them together on one node."""
    learner = {"device_mapping": [0, 1, 2, 4, 5, 6]}
    found = issues(config(learner, {"device_mapping": [0]}, **rewarded()), TWO_NODES)
    assert (
        "1 of 2 device(s), on one node each, are needed, and the other roles leave 0" in found["rewards.1.num_replicas"]
    )
    judges = rewarded(device_mapping=[2, 3, 4, 5])
    found = issues(config({"device": "cpu"}, engine(4), **judges), TWO_NODES)
    assert (
        "1 of 4 device(s), on one node each, are needed, and the other roles leave 0"
        in found["actor_infer.num_replicas"]
    )
    assert issues(config({"device": "cpu"}, engine(2), **judges), TWO_NODES) == {}


def test_a_reward_on_a_gpu_asks_for_cpu_on_a_machine_without() -> None:
    run = config({"device": "cpu"}, {"device": "cpu"}, **rewarded())
    assert issues(run, [ClusterNode("a", "10.0.0.1", 0)]).keys() == {"rewards.1.device"}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"device": "cpu", "device_mapping": [0]}, "has no effect on a CPU"),
        ({"device_mapping": [0, 1, 2]}, "3 device(s) is no multiple of the 2 of each replica"),
        ({"device_mapping": [0, 1], "num_replicas": 2}, "num_replicas: 2 of 2 device(s) disagree"),
    ],
)
def test_a_mapping_of_a_reward_agrees_with_its_replicas(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        config(**rewarded(**keys))
