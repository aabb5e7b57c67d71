import os

import pytest

from offbeat.trainer.run import prepare_environment
from tests.trainer.learner.harness import learner_config


def test_a_run_on_cpus_keeps_deepspeed_from_the_hosts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")
    config = learner_config(system_envs={"HF_HUB_OFFLINE": "0"})
    prepare_environment(config)
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert os.environ["OMP_NUM_THREADS"] == str(config.actor_train.num_threads)
    assert os.environ["HF_HUB_OFFLINE"] == "0", "the run's own environment comes last"
