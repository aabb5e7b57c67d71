"""One rank of a world with a critic, in the policy's processes or in its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.deploy import run_setup
from offbeat.deploy.config.loader import load_run
from offbeat.services.process import free_port
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.node_ranks import RANKS_PER_NODE, NodeRanks, encode_ranks
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.process.ranks import follow_rank_zero, lead
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.critic_trainer import CriticTrainer
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from tests.fakes import make_group
from tests.paths import CONFIGS

STEPS = 3
CORES = 16.0
"""Of a machine that the configuration is checked for; the ranks take turns on fewer."""
PPO = (
    "adv_estimator=gae",
    "reward_normalization.method=identity",
    "zero_variance=train",
    "critic_warmup=1",
    "ppo_epochs=2",
    "bootstrap_truncated=true",
    "actor_train.training_args.num_minibatches=2",
    "actor_train.training_args.max_tokens_per_microbatch=16",
    "tiny.num_hidden_layers=2",
    "warm_start.steps=2",
)
GROUPS = [make_group(n, rewards=(0.0, 1.0, 0.5)) for n in range(3)]


def train(out: Path, device: str, overrides: tuple[str, ...]) -> None:
    """Train, save, and continue from the checkpoint; rank 0 writes gauges and weights."""
    torch.set_num_threads(1)
    world = ranks_of_environment(device)
    values = [f"output_dir={out}", f"actor_train.device={device}", *overrides]
    config = load_run(CONFIGS / "quickstart.yaml", values, cores=CORES)
    if os.environ.get("RANK", "0") == "0":
        run_setup.prepare_folder(config)
    with process_group(world, timeout_min=2) as ranks:
        run = LearnerRun("critic", "now", out, config)
        if ranks.is_critic or ranks.rank > 0:
            trainer = CriticTrainer(run, ranks) if ranks.is_critic else PolicyTrainer(run, ranks)
            follow_rank_zero(trainer, ranks, config)
            return
        reported: list[dict[str, float]] = []
        saved = out / "saved"
        with lead(PolicyTrainer(run, ranks), ranks) as leader:
            leader.begin(lambda *_: None, lambda: False)
            for step in range(STEPS):
                if step == STEPS - 1:
                    saved.mkdir()
                    leader.save(saved)
                    leader.load(saved, leader.kl_coef, lambda *_: None, lambda: False)
                gauges = leader.train(StepBatch.build(step, GROUPS, config))
                reported.append({name: each.value for name, each in sorted(gauges.items())})
            weights = {name: tensor.cpu().clone() for name, tensor in leader.tensors()}
        (out / "gauges.json").write_text(json.dumps(reported))
        save_file(weights, out / "weights.safetensors")


def run_world(out: Path, device: str, nodes: NodeRanks, overrides: tuple[str, ...]) -> None:
    """Run a world's ranks as processes."""
    out.mkdir()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(nodes.total)}
    sizes = (f"actor_train.num_processes={nodes.policy}", f"critic.num_processes={nodes.critic or 'null'}")
    command = [sys.executable, __file__, str(out), device, *PPO, *sizes, *overrides]
    shared = {**os.environ, **address, RANKS_PER_NODE: encode_ranks([nodes]), "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(nodes.total)
    ]
    try:
        assert [process.wait(timeout=240) for process in running] == [0] * nodes.total
    finally:
        for process in running:
            process.kill()
            process.wait()


def learned(out: Path) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    return load_file(out / "weights.safetensors"), json.loads((out / "gauges.json").read_text())


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]))
