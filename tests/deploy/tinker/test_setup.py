from pathlib import Path

import pytest

from offbeat.deploy.config.loader import read_run
from offbeat.deploy.tinker.setup import TinkerSetup
from offbeat.services.errors import MeshError


@pytest.mark.parametrize("key", ["actor_infer.num_replicas", "actor_train.num_processes"])
def test_more_than_one_engine_or_learner_is_refused_with_its_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(MeshError, match=f"{key}: 2: a Tinker server has one engine and one learner: set it to 1"):
        TinkerSetup(read_run(Path("quickstart"), [f"output_dir={tmp_path}", f"{key}=2"]))
    assert not list(tmp_path.iterdir())
