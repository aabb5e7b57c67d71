from pathlib import Path

import pytest

from offbeat.deploy.cluster.ray_run_factory import Cluster, check_cluster
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, load_document, validate_tree
from offbeat.deploy.config.run import RunConfig
from tests.paths import QUICKSTART

URL = "redis://127.0.0.1:6390/0"


def run_config(*overrides: str) -> RunConfig:
    return validate_tree(compose_tree(QUICKSTART, overrides))


def paths(config: RunConfig, hosts: int = 1) -> list[str]:
    return [problem.path for problem in check_cluster(config, Cluster(8.0, 0.0, hosts), URL)]


def test_a_run_lives_in_the_redis_of_its_mesh():
    assert paths(run_config()) == []
    assert paths(run_config(f"redis.url={URL}")) == []
    assert paths(run_config("redis.url=redis://elsewhere:6379/0")) == ["redis.url"]


def test_shared_memory_is_refused_where_there_are_several_hosts():
    assert paths(run_config(), hosts=2) == ["weights.transport"]
    assert paths(run_config("weights.transport=fs"), hosts=2) == []


def test_relative_paths_start_from_the_folder_of_the_mesh(tmp_path: Path):
    config = load_document(QUICKSTART.read_text(), working_dir=tmp_path)
    assert config.output_dir == tmp_path / "runs/quickstart"


def test_a_run_is_checked_against_the_cluster_and_not_the_host_of_the_service():
    text = QUICKSTART.read_text().replace("num_workers: 1", "num_workers: 40")
    with pytest.raises(ConfigError, match=r"rollout\.num_workers"):
        load_document(text, cores=4.0, gpus=0.0)
    assert load_document(text, cores=32.0, gpus=0.0).rollout.num_workers == 40
    on_gpus = QUICKSTART.read_text().replace("  num_threads: 1", "  num_threads: 1\n  device: cuda")
    with pytest.raises(ConfigError, match=r"actor_train\.device"):
        load_document(on_gpus, cores=32.0, gpus=0.0)
    assert load_document(on_gpus, cores=32.0, gpus=8.0).actor_train.device == "cuda"
