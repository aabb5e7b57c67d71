"""Plans, and the command that prints them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.plan.changes import single_changes
from offbeat.deploy.plan.estimate import Effort, estimate
from offbeat.deploy.plan.machine import Machine, PartSizes, divisions
from offbeat.deploy.plan.memory import kv_gib_of, memory_of
from offbeat.deploy.plan.plan import make_plan, setup_of
from tests.deploy.plan.settings import measures_of, setup_with
from tests.paths import CONFIGS, QUICKSTART

pytestmark = pytest.mark.slow
TIMES = ("--env-latency", "lognormal:0.2:0.2", "--turn-latency", "0.02", "--turns", "uniform:3:12", "--train-s", "0.5")


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "quickstart", "--episodes", "400", *arguments])


def test_a_plan_names_the_change_that_helps_most(tmp_path: Path):
    picture = tmp_path / "plan.png"
    result = plan(*TIMES, "max_staleness=0", "--json", "--plot", str(picture), "--price-per-hour", "3.6")
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    configured, recommended = tree["configured"], tree["recommended"]
    rate = configured["estimate"]["trajectories_per_s"]
    best = next(change for change in tree["changes"] if change["is_setting"])
    assert best["text"] == "max_staleness=1"
    assert best["gain"] == pytest.approx(best["trajectories_per_s"] / rate)
    assert best["gain"] > 1.3
    assert recommended["estimate"]["trajectories_per_s"] > 1.5 * rate
    assert recommended["max_staleness"] > 0
    assert configured["cost_per_1000"] == pytest.approx(1 / rate)
    assert configured["estimate"]["lags"] == {"0": 1.0}
    closed = configured["estimate"]["closed"]
    assert closed["sync_step_s"] == pytest.approx(configured["estimate"]["step_s"], rel=0.1)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_refilled_groups_occupy_memory_until_the_checkpoint_of_their_step():
    setup, measures = setup_with(max_refills=100), measures_of()
    at = estimate(setup, measures, Effort.for_batch(setup.batch, 200))
    none, half = (memory_of(at, setup, replace(measures, no_signal=(share,)), 10, None).redis_mib for share in (0, 0.5))
    consumed = 10 * setup.limits.groups_per_step
    waiting = at.playing_groups + at.waiting_groups
    assert half / none == pytest.approx((waiting + 2 * consumed) / (waiting + consumed))


def test_the_table_says_what_would_help_most():
    result = plan(*TIMES, "max_staleness=0")
    assert result.exit_code == 0, result.output
    assert "max_staleness=1 would help most: +" in result.output
    assert "synchronous" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--from RUN), or --env-latency, --turn-latency, --train-s"),
        (("--env-latency", "1"), "--turn-latency, --train-s"),
        ((*TIMES, "--env-latency", "gamma:1"), "'gamma:1'"),
        ((*TIMES, "--turn-latency", "x"), "must be seconds"),
        (("--env-latency", "0", "--turn-latency", "0", "--train-s", "0"), "needs a time above 0"),
        (("--from", "no/such/run"), "there is no run in no/such/run"),
        ((*TIMES, "--cpus", "1"), "no room for an engine, a worker and a learner"),
        ((*TIMES, "max_stalenes=1"), "max_stalenes"),
        ((*TIMES, "train_env_manager.tags=[Nope]"), "train_env_manager.tags: custom_envs has no Nope"),
        ((*TIMES, "--plot", "plan.svg"), "--plot plan.svg: name a .png"),
        ((*TIMES, "--plot", "no/such/plan.png"), "in a folder that exists"),
    ],
)
def test_a_plan_that_cannot_be_made_says_what_is_missing(arguments: tuple[str, ...], complaint: str):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert complaint in result.output.replace("\n", "")
    assert "Traceback" not in result.output


def test_a_policy_without_words_has_a_plan_all_the_same(tmp_path: Path):
    text = "custom_envs: {P: {env_type: gymnasium, env_config: {id: Pendulum-v1}}}\nexp_name: p\npretrain: tiny\n"
    (tmp_path / "run.yaml").write_text(text)
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), "--episodes", "400", *TIMES])
    assert result.exit_code == 0, result.output


def test_a_picture_that_can_not_be_written_is_a_line():
    result = plan(*TIMES, "--plot", "/proc/plan.png")
    assert result.exit_code == 2
    assert "--plot /proc/plan.png: can't be written: " in result.output


def test_a_pipeline_of_rows_has_no_plan():
    result = CliRunner().invoke(app, ["plan", "sft", *TIMES])
    assert result.exit_code == 2
    assert "reads rows" in result.output


def test_baselines_are_waited_for_and_not_trained_on():
    config = read_run(CONFIGS / "recipes/remax.yaml")
    setup = setup_of(config)
    assert setup.limits.group_size > config.train_env_manager.group_size
    assert setup.batch == config.rollout_batch_size


@pytest.mark.parametrize(
    ("keys", "most", "key"),
    [
        (("execution=thread",), 8, "rollout.num_threads=16"),
        (("max_env_step_concurrent=4",), 4, "custom_envs.FrozenLake.max_env_step_concurrent=8"),
        (("execution=thread", "use_thread_lock=true"), 1, "rollout.num_workers=2"),
    ],
)
def test_what_limits_env_steps_limits_the_plan_and_is_named(keys: tuple[str, ...], most: int, key: str):
    """Five turns of 2 s in the env."""
    times = ("--env-latency", "2", "--turns", "5", "--turn-latency", "0.1", "--train-s", "0.5")
    result = plan(*times, *(f"custom_envs.FrozenLake.{each}" for each in keys), "--json")
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    assert tree["configured"]["estimate"]["trajectories_per_s"] == pytest.approx(most / 2 / 5, rel=0.05)
    gains = {change["text"]: change["gain"] for change in tree["changes"]}
    assert gains[key] > 1.7


def test_agents_limit_the_plan_and_are_named():
    setup = setup_of(read_run(CONFIGS / "foreign_agent.yaml"))
    assert (setup.slots, setup.agents, setup.running) == (32, 8, 8)
    texts = [change.text for change in single_changes(setup, measures_of(), 32)]
    assert "custom_envs.FrozenLake.agent_runner.num_agents=16" in texts
    assert setup_of(read_run(CONFIGS / "terminal.yaml")).env_steps == 8


def test_a_machine_is_divided_between_engines_and_learner():
    config = read_run(QUICKSTART, ["actor_infer.cpus_per_replica=2", "rollout.cpus_per_worker=1"])
    sizes, setup, measures = PartSizes.of(config, Machine(cpus=8)), setup_of(config), measures_of(train_s=1.0)
    assert [d.learner_processes for d in divisions(Machine(), sizes, setup, measures)] == [1]
    found = list(divisions(Machine(cpus=8), sizes, setup, measures))
    assert [division.setup.num_replicas for division in found] == [1, 2, 3]
    assert all(sizes.cpus(division.setup, division.learner_processes) <= 8 for division in found)


def test_engines_of_transformers_take_no_gpu():
    """`hf_infer` computes on CPUs, so that a machine's GPUs are the learner's."""
    config = read_run(QUICKSTART, ["actor_infer.strategy_args={strategy_name: hf_infer, strategy_config: {}}"])
    machine, setup, measures = Machine(gpus=4, cpus=64), setup_of(config), measures_of(train_s=1.0)
    sizes = PartSizes.of(config, machine)
    found = list(divisions(machine, sizes, setup, measures))
    assert max(division.setup.num_replicas for division in found) > 4
    assert {division.learner_processes for division in found} == {4}
    assert {sizes.gpus(division.setup, division.learner_processes) for division in found} == {4}
    on_cpu = PartSizes.of(read_run(QUICKSTART, ["actor_train.device=cpu"]), Machine(gpus=4))
    assert on_cpu.gpus(setup_of(read_run(QUICKSTART)), 1) == 1


def test_what_has_devices_of_its_own_leaves_fewer_to_engines_and_learner():
    own = ("adv_estimator=gae", "reward_normalization.method=identity", "critic.num_processes=2")
    scored = ("use_kl_loss=true", "kl_loss_coef=0.1", "reference.strategy_args.placement=service")
    reward = (
        "pipeline=rlvr",
        "rewards=[{name: judge, kind: reward_model, model_args: {model_name_or_path: judge}, device: cuda, "
        "cpus_per_replica: 3}]",
    )
    sizes = PartSizes.of(read_run(QUICKSTART, [*own, *scored, *reward]), Machine(gpus=8))
    assert (sizes.critic_processes, sizes.other_gpus, sizes.other_cpus) == (2, 2, 3.0)
    setup, measures = setup_of(read_run(QUICKSTART)), measures_of(train_s=1.0)
    found = {d.setup.num_replicas: d.learner_processes for d in divisions(Machine(gpus=8), sizes, setup, measures)}
    assert found == {1: 3, 2: 2, 3: 1}
    assert not list(divisions(Machine(gpus=5), sizes, setup, measures))
    assert sizes.cpus(setup, 1) - PartSizes.of(read_run(QUICKSTART), Machine(gpus=8)).cpus(setup, 1) == 2 + 3


def test_the_table_names_a_critics_processes():
    own = ("adv_estimator=gae", "reward_normalization.method=identity", "critic.num_processes=1")
    result = plan(*TIMES, *own, "--json")
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)["configured"]
    assert (tree["critic_processes"], tree["cpus"]) == (1, 1 + 0.5 + 1 + 1)


CPU_ENGINES = ("actor_infer.device=cpu", "actor_infer.num_replicas=3")


@pytest.mark.parametrize(
    ("keys", "machine", "found"),
    [
        (("actor_train.device=cuda",), Machine(cpus=5), {(1, 1), (2, 1), (3, 1)}),
        (("actor_train.device=cuda", "actor_infer.device=cuda", "actor_infer.num_replicas=2"), Machine(cpus=32),
         {(1, 1), (2, 1)}),
        (CPU_ENGINES, Machine(gpus=1), {(3, 1)}),
        ((*CPU_ENGINES, "actor_train.device=cpu"), Machine(gpus=1), {(3, 1)}),
    ],
)  # fmt: skip
def test_what_has_no_limit_stays_as_configured(keys: tuple[str, ...], machine: Machine, found: set[tuple[int, int]]):
    """Engines and learner processes."""
    config = read_run(QUICKSTART, list(keys))
    parts = divisions(machine, PartSizes.of(config, machine), setup_of(config), measures_of(train_s=1.0))
    assert {(division.setup.num_replicas, division.learner_processes) for division in parts} == found


@pytest.mark.parametrize("per_worker", [16, 4])
def test_a_recommendation_fits_its_machine_and_is_no_slower_than_the_configured_setting(per_worker: int):
    """A batch's groups need 16 workers, of half a core each."""
    keys = [
        f"rollout.max_env_num_per_worker={per_worker}", "rollout.num_workers=4", "train_env_manager.num_env_groups=8",
        "rollout_batch_size=256",
    ]  # fmt: skip
    made = make_plan(read_run(QUICKSTART, keys), measures_of(train_s=0.2), machine=Machine(cpus=4), episodes=300)
    assert made.recommended.cpus <= 4
    rates = [each.estimate.trajectories_per_s for each in (made.configured, made.recommended)]
    assert rates[1] > 0.95 * rates[0]


def test_learner_processes_train_faster_on_more_gpus():
    sizes = PartSizes(True, True, 2, 1.0, 1.0, 2, 1.0)
    found = list(divisions(Machine(gpus=8), sizes, setup_of(read_run(QUICKSTART)), measures_of(train_s=1.0)))
    shares = {d.setup.num_replicas: (d.learner_processes, d.measures.train_fixed_s) for d in found}
    assert shares == {1: (6, pytest.approx(1 / 3)), 2: (4, pytest.approx(0.5)), 3: (2, pytest.approx(1.0))}


def test_keys_and_values_take_what_the_architecture_says():
    tree = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert kv_gib_of({**tree, "dtype": "bfloat16"}, 2**30, 5) == 2 * 30 * 3 * 64 * 2
    assert kv_gib_of({**tree, "torch_dtype": "float32"}, 2**30, 5) == 2 * 30 * 3 * 64 * 4
    assert kv_gib_of({"model_type": "rwkv"}, 2**30, 5) is None
    recurrent = {**tree, "layer_types": ["conv", "conv", "full_attention"] * 10, "conv_L_cache": 3}
    assert kv_gib_of(recurrent, 2**30, 0) == 2 * 10 * 3 * 64 * 2
    assert kv_gib_of(recurrent, 0, 2**30) == 20 * 3 * 576 * 2
