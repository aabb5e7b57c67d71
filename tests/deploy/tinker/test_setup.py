from pathlib import Path

import pytest

from offbeat.deploy.config.loader import read_run
from offbeat.deploy.tinker.setup import TinkerSetup
from offbeat.services.errors import MeshError
from offbeat.services.generation.config import GenerationConfig


@pytest.mark.parametrize("key", ["actor_infer.num_replicas", "actor_train.num_processes"])
def test_more_than_one_engine_or_learner_is_refused_with_its_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(MeshError, match=f"{key}: 2: a Tinker server has one engine and one learner: set it to 1"):
        TinkerSetup(read_run(Path("quickstart"), [f"output_dir={tmp_path}", f"{key}=2"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_adapters_on_gpus_are_sampled_in_bfloat16(tmp_path: Path, device: str, dtype: str) -> None:
    setup = TinkerSetup(read_run(Path("quickstart"), [f"output_dir={tmp_path}", f"actor_infer.device={device}"]))
    settings = setup.service("redis://127.0.0.1/0")
    assert GenerationConfig.model_validate_json(settings.generation).model_args.dtype == dtype
