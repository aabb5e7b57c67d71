"""A critic with processes of its own: bit for bit the one in the learner's process, also after a kill and a move."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.trainer.engines.node_ranks import NodeRanks
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.optimizer_step import Gauges
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from tests.fakes import make_group, train_on
from tests.forked import ForkedProcess
from tests.integration.critic_rank import learned, run_world
from tests.integration.learner_run import Run, a_run, rank_of
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.timeout(600)
STEPS = 4
PPO = (
    "adv_estimator=gae",
    "reward_normalization.method=identity",
    "critic_warmup=1",
    "ppo_epochs=2",
    "bootstrap_truncated=true",
    "use_kl_loss=true",
    "kl_loss_coef=0.05",
    "critic.training_args.warmup_steps=2",
    "actor_train.training_args.num_minibatches=2",
    "actor_train.training_args.max_tokens_per_microbatch=256",
    "actor_train.strategy_args.strategy_name=fsdp2_train",
    f"max_steps={STEPS}",
)
OWN = "critic.num_processes=1"


@pytest.fixture(scope="module")
def within(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run whose critic is in the learner's process."""
    with a_run(redis_server, tmp_path_factory.mktemp("within"), "within", PPO) as run:
        assert run.start().wait(timeout=240) == 0, run.complaint()
        yield run


def newest(run: Run) -> Path:
    return run.config.output_dir / "checkpoints" / f"step-{STEPS:06d}"


def states(run: Run) -> dict[str, Tensor]:
    """Return weights and moments of policy and critic in the last checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = newest(run) / "state"
    found: dict[str, Tensor] = {}
    for name in ("policy", "critic"):
        out = run.config.output_dir / f"{name}.pt"
        dcp_to_torch_save(folder / name, out)
        found |= {f"{name}/{key}": value for key, value in flat("", torch.load(out, weights_only=True)).items()}
    return found


def flat(prefix: str, tree: object) -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else ()
    return {key: value for name, child in items for key, value in flat(f"{prefix}/{name}", child).items()}


def gauges(run: Run) -> dict[int, dict[str, float]]:
    """Return what steps report of training, by step."""
    steps = [record for record in run.records() if record.source == "learner" and record.step is not None]
    return {
        record.step or 0: {
            name: each.value for name, each in record.values.items() if name.startswith(("actor/", "critic/"))
        }
        for record in steps
    }


def kill_critic(run: Run, learner: ForkedProcess) -> None:
    rank_of(learner.pid, 1).kill()
    assert learner.wait(timeout=120) != 0
    assert lines_of(run, "rank 1 (pid")


def lines_of(run: Run, text: str) -> int:
    return (run.config.output_dir / "logs" / "learner.log").read_text().count(text)


def test_a_killed_critic_of_its_own_returns_with_the_learner_and_nothing_differs(
    redis_server: str, tmp_path: Path, within: Run
) -> None:
    """The second world repeats what no checkpoint holds."""
    with a_run(redis_server, tmp_path, "own", (*PPO, OWN)) as run:
        learner = run.start()
        wait_until_sync(lambda: run.published() >= 3, timeout_s=240)
        kill_critic(run, learner)
        assert run.start().wait(timeout=240) == 0, run.complaint()
        expected, found = states(within), states(run)
        assert expected.keys() == found.keys()
        assert any(key.startswith("critic/") and "exp_avg" in key for key in found)
        assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []
        reported = gauges(run)
        assert reported == gauges(within)
        assert ["actor/pg_loss" in values for values in reported.values()] == [False, *[True] * (STEPS - 1)]
        assert all("critic/loss" in values for values in reported.values())
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (2 * STEPS, 2 * STEPS, 0)
        state = json.loads((newest(run) / "learner.json").read_text())
        assert (state["num_processes"], state["num_critic_processes"]) == (1, 1)
        assert_moves_into_the_learner(run, within)


@pytest.mark.nightly
def test_a_critic_of_its_own_under_zero_2_equals_the_one_in_the_learner(tmp_path: Path) -> None:
    """Two ranks of each role shard gradients and moments among themselves, and continue from a checkpoint."""
    for name, nodes in (("within", NodeRanks(2)), ("own", NodeRanks(2, 2))):
        run_world(tmp_path / name, "cpu", nodes, ("actor_train.strategy_args.zero_stage=2",))
    (weights, reported), (expected, within) = learned(tmp_path / "own"), learned(tmp_path / "within")
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, weights[name])] == []
    assert reported == within
    assert "critic/loss" in reported[-1]


def assert_moves_into_the_learner(own: Run, within: Run) -> None:
    """Assert that one process continues from both checkpoints with the same weights and gauges."""
    torch.set_num_threads(1)
    continued: list[tuple[Gauges, dict[str, Tensor]]] = []
    with process_group(ranks_of_environment("cpu")) as alone:
        for run in (own, within):
            trainer = PolicyTrainer(LearnerRun("moved", "now", run.config.output_dir, run.config), alone)
            trainer.load(newest(run), 0.0)
            gauges = train_on(trainer, [make_group(n, rewards=(0.0, 1.0, 0.5)) for n in range(2)], STEPS)
            continued.append((gauges, {name: tensor.clone() for name, tensor in trainer.tensors()}))
    (one, weights), (other, expected) = continued
    assert one == other
    assert "critic/loss" in one
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, expected[name])] == []
