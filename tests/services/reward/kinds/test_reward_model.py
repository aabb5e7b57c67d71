import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from offbeat.services.chat.assistant_tokens import AssistantTokens
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import build_function
from offbeat.services.reward.kinds.reward_model import ConversationScorer
from offbeat.services.reward.sample import RewardSample
from tests.services.reward.reward_models import write_reward_model
from tests.services.reward.samples import config_of, sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward-model")
    write_reward_model(folder, num_labels=2)
    return folder


def test_tokens_are_those_of_training(tmp_path: Path):
    """Transformers' classes rebuild some architectures' tokenizers, and ignore tokenizer.json."""
    write_reward_model(tmp_path)
    changes: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast"},
        "config.json": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
    }
    for name, values in changes.items():
        path = tmp_path / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    config, one = config_of("reward_model", model_args={"model_name_or_path": str(tmp_path)}), sample("Of  the air")
    messages = [*map(dict, one.prompt), {"role": "assistant", "content": one.response}]
    assert ConversationScorer(config).tokenize(one) == AssistantTokens(tmp_path).tokenize(messages).tokens


def score_all(
    folder: Path, samples: list[RewardSample], model_args: dict[str, str] | None = None, **settings: Any
) -> list[float | BaseException]:
    async def main() -> list[float | BaseException]:
        args = {"model_name_or_path": str(folder), **(model_args or {})}
        function = build_function(config_of("reward_model", model_args=args, **settings))
        try:
            return await asyncio.gather(*(function.score(each) for each in samples), return_exceptions=True)
        finally:
            await function.close()

    return asyncio.run(main())


def reference(folder: Path, response: str, label: int = 0, max_length: int = 10_000) -> float:
    """Score one conversation alone, by Transformers' own head."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": response}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][-max_length:]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = -1  # none of the tokens is padding
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([ids])).logits[0, label])


def test_scores_are_those_of_the_model_alone_whatever_the_batch(folder: Path):
    responses = ["Because of the air.", "No", "x" * 200, "", ("air " * 50).strip()]
    expected = [reference(folder, response, label=1) for response in responses]
    assert len(set(expected)) == 5
    for max_batch_tokens in (1, 200, 100_000):
        scores = score_all(folder, [sample(r) for r in responses], label=1, max_batch_tokens=max_batch_tokens)
        assert scores == pytest.approx(expected, abs=1e-5)


def test_model_args_choose_dtype_and_attention(folder: Path):
    samples = [sample("Because of the air.")]
    exact = score_all(folder, samples)
    rounded = score_all(folder, samples, {"dtype": "bfloat16"})
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.1)
    config = config_of("reward_model", model_args={"model_name_or_path": str(folder), "attn_implementation": "eager"})
    assert ConversationScorer(config)._model.config._attn_implementation == "eager"
    assert score_all(folder, samples, {"attn_implementation": "eager"}) == pytest.approx(exact, abs=1e-5)


def test_flash_attention_needs_a_gpu():
    args = {"model_name_or_path": "f", "attn_implementation": "flash_attention_2"}
    with pytest.raises(ValidationError, match="flash_attention_2 needs device cuda"):
        config_of("reward_model", model_args=args)
    assert config_of("reward_model", model_args=args, device="cuda").gpus_per_replica == 1


def test_thoughts_are_left_out_unless_wanted(folder: Path):
    thought = sample("<think>hm</think>No")
    assert score_all(folder, [thought]) == pytest.approx([reference(folder, "No")], abs=1e-5)
    whole = reference(folder, thought.response)
    assert score_all(folder, [thought], includes_thoughts=True) == pytest.approx([whole], abs=1e-5)


def test_long_conversations_lose_their_beginning(folder: Path):
    expected = reference(folder, ("air " * 50).strip(), max_length=20)
    assert score_all(folder, [sample(("air " * 50).strip())], max_length=20) == pytest.approx([expected], abs=1e-5)


def test_a_conversation_that_the_template_refuses_fails_alone(folder: Path):
    broken = RewardSample([{"role": "user", "content": 3}], "x")
    good, bad = score_all(folder, [sample("No"), broken])
    assert good == pytest.approx(reference(folder, "No"), abs=1e-5)
    assert isinstance(bad, RewardError)
    assert bad.failure is Failure.BAD_ROW


def test_hostile_text_is_text(folder: Path):
    texts = ["<|im_end|>" * 50, "\ud800", "\0" * 10, "{{ 7 * 7 }}", "🙂" * 500]
    scores = score_all(folder, [sample(text) for text in texts])
    assert all(isinstance(score, float | RewardError) for score in scores), scores
    assert isinstance(scores[3], float)


def test_folders_without_a_reward_model_are_refused(folder: Path, tmp_path: Path):
    def build(path: Path, **settings: Any) -> None:
        build_function(config_of("reward_model", model_args={"model_name_or_path": str(path)}, **settings))

    with pytest.raises(ValueError, match="no such folder"):
        build(tmp_path / "missing")
    with pytest.raises(ValueError, match="can't be loaded"):
        build(tmp_path)
    with pytest.raises(ValueError, match=r"label 2: the model has 2 label\(s\)"):
        build(folder, label=2)
    from tests.qwen2 import write_qwen2

    write_qwen2(tmp_path / "policy", ["a policy without a head"])
    with pytest.raises(ValueError, match=r"lack score.weight: it is no trained reward model"):
        build(tmp_path / "policy")
