"""`python -m offbeat.benchmarks.peer.policy CONFIG OUT`: the warm-started policy of both sides."""

import logging
import sys
from pathlib import Path

import torch

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.run_setup import prepare_folder
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer


def make_policy(config_file: Path, out: Path) -> None:
    config = load_run(config_file)
    torch.set_num_threads(config.actor_train.num_threads)
    torch.manual_seed(config.seed)
    prepare_folder(config)
    ranks = ranks_of_environment("cpu")
    with process_group(ranks):
        trainer = PolicyTrainer(LearnerRun(config.exp_name, config.exp_name, config.output_dir, config), ranks)
        trainer.begin(lambda *_: None, lambda: False)
        out.mkdir(parents=True)
        trainer.save(out)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    make_policy(Path(sys.argv[1]), Path(sys.argv[2]))
