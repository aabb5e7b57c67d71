"""A critic with processes of its own: bit for bit the one in the learner's process, also after a kill and a move."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from tests.integration.learner_run import Run, a_run
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.timeout(300)
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
)
OWN = "critic.num_processes=1"
STEPS = 6


@pytest.fixture(scope="module")
def within(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run whose critic is in the learner's process."""
    with a_run(redis_server, tmp_path_factory.mktemp("within"), "within", PPO) as run:
        assert run.start().wait(timeout=240) == 0, run.complaint()
        yield run


def critic_of(learner: int) -> psutil.Process:
    (rank,) = [child for child in psutil.Process(learner).children(True) if child.environ().get("RANK") == "1"]
    return rank


def states(run: Run) -> dict[str, Tensor]:
    """Return weights and moments of policy and critic in the last checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = run.config.output_dir / "checkpoints" / f"step-{STEPS:06d}" / "state"
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


def kill_critic(run: Run, learner: subprocess.Popen[bytes]) -> None:
    critic_of(learner.pid).kill()
    assert learner.wait(timeout=60) != 0
    assert lines_of(run, "rank 1 (pid")


def configure(run: Run, **critic: object) -> None:
    """Change the critic in the run's record, for the next learner."""
    tree = json.loads(run.config.model_dump_json())
    tree["critic"] |= critic
    run.redis.hset(run.keys.record, "config", json.dumps(tree))


def lines_of(run: Run, text: str) -> int:
    return (run.config.output_dir / "logs" / "learner.log").read_text().count(text)


def written_by(run: Run, step: int) -> tuple[int, int]:
    state = json.loads((run.config.output_dir / "checkpoints" / f"step-{step:06d}" / "learner.json").read_text())
    return state["num_processes"], state["num_critic_processes"]


def test_a_critic_of_its_own_is_killed_returns_and_moves_and_nothing_differs(
    redis_server: str, tmp_path: Path, within: Run
) -> None:
    """The second world repeats what no checkpoint holds; the third has the critic in the learner's process again."""
    with a_run(redis_server, tmp_path, "own", (*PPO, OWN)) as run:
        learner = run.start()
        wait_until_sync(lambda: run.published() >= 3, timeout_s=120)
        kill_critic(run, learner)
        learner = run.start()
        wait_until_sync(lambda: lines_of(run, "resuming from") == 1, timeout_s=120)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(timeout=60) == 0
        newest = max(int(each.name[5:]) for each in (run.config.output_dir / "checkpoints").glob("step-*"))
        assert newest < STEPS
        assert written_by(run, newest) == (1, 1)
        configure(run, num_processes=None)
        assert run.start().wait(timeout=120) == 0, run.complaint()
        assert written_by(run, STEPS) == (1, 0)
        expected, found = states(within), states(run)
        assert expected.keys() == found.keys()
        assert any(key.startswith("critic/") and "exp_avg" in key for key in found)
        assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []
        reported = gauges(run)
        assert reported == gauges(within)
        assert ["actor/pg_loss" in values for values in reported.values()] == [False, True, True, True, True, True]
        assert all("critic/loss" in values for values in reported.values())
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (2 * STEPS, 2 * STEPS, 0)
