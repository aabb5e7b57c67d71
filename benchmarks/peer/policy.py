"""`python -m offbeat.benchmarks.peer.policy CONFIG OUT`: the warm-started policy of both sides.

`OUT.json` gets the seconds that the warm start took, without imports.
"""

import json
import logging
import sys
import time
from pathlib import Path

import torch

from offbeat.benchmarks.peer.options import WARM_START_S
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.run_setup import prepare_folder
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer


def make_policy(config_file: Path, out: Path) -> None:
    began = time.perf_counter()
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
    out.with_suffix(".json").write_text(json.dumps({WARM_START_S: time.perf_counter() - began}), encoding="utf-8")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    make_policy(Path(sys.argv[1]), Path(sys.argv[2]))
