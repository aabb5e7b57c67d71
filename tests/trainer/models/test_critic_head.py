"""`critic.model_args.model_type`: a critic that starts with a classifier's head."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.critic_trainer import load_first_critic
from tests.trainer.models.test_policy import packed_batch

CLASSES: dict[str, Any] = {
    "auto_sequence_classification": Qwen2ForSequenceClassification,
    "auto_token_classification": Qwen2ForTokenClassification,
}
KEY = "critic.model_args.model_type"


def write_classifier(folder: Path, model_type: str, num_labels: int = 1) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = Qwen2Config(vocab_size=64, num_key_value_heads=2, num_labels=num_labels, pad_token_id=0, **sizes)
    model = CLASSES[model_type](config)
    if model.score.bias is not None:
        torch.nn.init.ones_(model.score.bias)
    model.save_pretrained(folder)
    return model


def learner(folder: Path, model_type: str | None) -> LearnerConfig:
    args = {"model_name_or_path": str(folder), "model_type": model_type}
    return LearnerConfig.model_validate({"adv_estimator": "gae", "critic": {"model_args": args}})


def issues(config: LearnerConfig) -> dict[str, str]:
    return {issue.path: issue.message for issue in check_learner(config)}


@pytest.mark.parametrize("model_type", CLASSES)
def test_first_values_are_the_classifiers_scores(model_type: str, tmp_path: Path) -> None:
    classifier = write_classifier(tmp_path, model_type).eval()
    config = learner(tmp_path, model_type)
    assert KEY not in issues(config)
    critic, new = (
        load_first_critic(LearnerRun("r", "now", tmp_path, each)) for each in (config, learner(tmp_path, None))
    )
    tokens, packing, positions = packed_batch()
    x = PackedInput(tokens, packing, positions)
    bounds = packing.cu_seqlens.tolist()
    hidden = [classifier.base_model(tokens[None, start:end]).last_hidden_state[0] for start, end in pairwise(bounds)]
    expected = classifier.score(torch.cat(hidden))[:, 0]
    torch.testing.assert_close(critic(x), expected[positions - 1])
    assert not new(x).any()


def test_a_folder_without_such_a_head_is_refused_before_the_start(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("two", "tokens", "none")]
    write_classifier(folders[0], "auto_sequence_classification", num_labels=2)
    write_classifier(folders[1], "auto_token_classification")
    folders[2].mkdir()
    for folder in folders:
        message = issues(learner(folder, "auto_sequence_classification"))[KEY]
        assert f"{folder} holds no ForSequenceClassification of one label" in message
        assert KEY not in issues(learner(folder, None))
