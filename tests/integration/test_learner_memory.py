"""What a learner has in memory after the warm start of a policy with adapters."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.deploy import run_setup
from offbeat.deploy.config.loader import load_run
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from tests.paths import CONFIGS

KEYS = ("actor_train.model_args.lora_target=all-linear", "actor_train.model_args.dtype=bfloat16")
STRATEGY = "actor_train.strategy_args"


def begun(folder: Path, ranks: Ranks, *keys: str) -> PolicyTrainer:
    config = load_run(CONFIGS / "quickstart.yaml", [f"output_dir={folder}", *KEYS, *keys])
    run_setup.prepare_folder(config)
    trainer = PolicyTrainer(LearnerRun("run", "now", folder, config), ranks)
    assert trainer.begin(lambda *_: None, lambda: False)
    return trainer


def count_bytes() -> int:
    """Return the memory of all tensors, those exempted from collections included."""
    gc.unfreeze()
    for _ in range(10):  # what hooks of tensors refer to takes a second time, what earlier tests left may take more
        if not gc.collect():
            break
    storages = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


@pytest.mark.parametrize("key", ["zero_stage=1", "zero_stage=2", "zero_stage=3", "strategy_name=fsdp2_train"])
def test_the_warm_start_of_all_weights_leaves_nothing_beside_adapters(tmp_path: Path, key: str) -> None:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        before = count_bytes()
        cold = begun(tmp_path / "cold", ranks, f"{STRATEGY}.{key}", "warm_start=null")
        with_cold = count_bytes()
        warm = begun(tmp_path / "warm", ranks, f"{STRATEGY}.{key}", "warm_start.steps=2")
        assert count_bytes() - with_cold < 1.1 * (with_cold - before)
        assert cold.vocab_size == warm.vocab_size
