"""Rows with images are for policies that read them."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import load_run
from offbeat.envs.frozen_lake.env import WORDS
from offbeat.services.chat.vision import encode_png
from tests.families import write_vision_policy
from tests.paths import CONFIGS


def test_rows_with_images_need_a_policy_that_is_asked_to_read_them(tmp_path: Path):
    """Its folder has image processing, with which the rows are rendered either way."""
    write_vision_policy(tmp_path / "policy", "qwen3_vl", WORDS)
    png = base64.b64encode(encode_png(np.zeros((32, 32, 3), dtype=np.uint8))).decode()
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Up"}]}
    row = {"messages": [user, {"role": "assistant", "content": "Left"}], "images": [f"data:image/png;base64,{png}"]}
    for name in ("rows", "val"):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    sees = f"pretrain={tmp_path / 'policy'}"
    files = [f"data.{key}_name={tmp_path / name}.jsonl" for key, name in (("dataset", "rows"), ("val_dataset", "val"))]
    with pytest.raises(ConfigError) as caught:
        load_run(CONFIGS / "sft.yaml", [*files, sees])
    problem = {issue.path: issue.message for issue in caught.value.issues}["data.dataset_name"]
    assert "its rows have images, and the policy has no image input" in problem
    assert "for qwen3_vl" in problem
    config = load_run(CONFIGS / "sft.yaml", [*files, sees, "+actor_train.model_args.image_input=true"])
    assert config.actor_infer.model_args.image_input
