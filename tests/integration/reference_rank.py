"""One rank of a learner whose reference scores two files of rows: rank 0 is stopped after the first, then begins again, and
resumes alike once the rows have changed.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from offbeat.deploy import run_setup
from offbeat.deploy.config.loader import load_run
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.process.ranks import follow_rank_zero, lead
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from offbeat.trainer.training.score_files import ROWS_PER_FILE
from tests.paths import CONFIGS

PAIR = {"prompt": "a b", "chosen": "b", "rejected": "a"}
NUM_ROWS = 2 * ROWS_PER_FILE
SMALL = ("tiny.num_hidden_layers=1", "eval_steps=0", "data.val_dataset_name=null", "dpo.precompute_ref_log_probs=true")


def main(folder: Path) -> None:
    """Write what `begin` and `load` returned, and the progress that they showed."""
    torch.set_num_threads(1)
    ranks = ranks_of_environment("cpu")
    files = (f"output_dir={folder / f'rank-{ranks.rank}'}", f"data.dataset_name={folder / 'pairs.jsonl'}")
    config = load_run(CONFIGS / "dpo.yaml", [*files, *SMALL])
    run_setup.prepare_folder(config)
    with process_group(ranks) as ranks:
        trainer = PolicyTrainer(LearnerRun("run", "now", config.output_dir, config), ranks)
        if ranks.rank:
            follow_rank_zero(trainer, ranks, config)
            return
        shown: list[tuple[int, int]] = []
        resumed: list[tuple[int, int]] = []
        checkpoint = folder / "checkpoint"
        with lead(trainer, ranks) as leader:
            begun = [
                leader.begin(lambda *progress: shown.append(progress), should_stop)
                for should_stop in (lambda: bool(shown), lambda: False)
            ]
            (checkpoint / "state").mkdir(parents=True)
            leader.save(checkpoint)
            write_rows(folder, {**PAIR, "chosen": "b b"})
            loaded = [
                leader.load(checkpoint, 0.0, lambda *progress: resumed.append(progress), should_stop)
                for should_stop in (lambda: bool(resumed), lambda: False)
            ]
        (folder / "shown.json").write_text(json.dumps([begun, shown, loaded, resumed]))


def write_rows(folder: Path, row: dict[str, str]) -> None:
    (folder / "pairs.jsonl").write_text((json.dumps(row) + "\n") * NUM_ROWS)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # other ranks wait for this one
