import os

import pytest

from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.run import buffer_limits, prepare_environment
from tests.trainer.learner.harness import learner_config


def test_a_run_on_cpus_keeps_deepspeed_from_the_hosts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")
    config = learner_config(system_envs={"HF_HUB_OFFLINE": "0"})
    prepare_environment(config)
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert os.environ["OMP_NUM_THREADS"] == str(config.actor_train.num_threads)
    assert os.environ["HF_HUB_OFFLINE"] == "0", "the run's own environment comes last"


@pytest.mark.parametrize(("pipeline", "redundancy"), [("agentic", 1), ("sft", 0), ("dpo", 0), ("reward_model", 0)])
def test_a_row_has_no_more_members_than_its_pipeline(pipeline: str, redundancy: int) -> None:
    """In a resumed run, too: a third member of a pair can't be read, and KTO's is a response of another row."""
    rows = {} if pipeline == "agentic" else {"data": {"dataset_name": "rows.jsonl"}}
    config = LearnerRunConfig.model_validate(
        {"pipeline": pipeline, "train_env_manager": {"group_size_redundancy": 1}, **rows}, strict=False
    )
    assert buffer_limits(config).redundancy == redundancy
