"""The built-in policy's folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import TURN_END, vocabulary, write_tiny_policy

WORDS = (
    "Walk",
    "P",
    "to",
    "G",
    ".",
    "Avoid",
    "O",
    "_",
    "#",
    "Left",
    "Down",
    "Right",
    "Up",
    "row",
    "col",
    *"0123456789",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_tiny_policy(path, TinyPolicyConfig(), WORDS)
    return path


def test_writing_the_policy_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, offbeat.trainer.models.tiny; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_writing_the_policy_twice_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(), WORDS)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_every_word_is_one_token_and_line_ends_cost_none(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("P _\nO # Down<|im_end|>\n").ids
    assert ids == [vocabulary(WORDS)[word] for word in ("P", "_", "O", "#", "Down", TURN_END)]
    assert tokenizer.decode(ids) == "P _ O # Down"


def test_an_unknown_word_is_the_unknown_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("Sideways").tokens == ["<unk>"]


def test_transformers_loads_the_tokenizer_as_it_was_written(folder: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    text = "P _ O _\n_ # G\nrow 0"
    assert loaded(text)["input_ids"] == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(loaded) == json.loads((folder / "config.json").read_text())["vocab_size"]
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<pad>")


def test_the_chat_template_is_append_only(folder: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Walk"}, {"role": "user", "content": "P _"}]
    prompt = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    longer = [*messages, {"role": "assistant", "content": "Down"}, {"role": "user", "content": "_ P"}]
    full = loaded.apply_chat_template(longer, add_generation_prompt=True, return_dict=False)
    answer = loaded.encode("Down<|im_end|>")
    assert full[: len(prompt) + len(answer)] == prompt + answer


def test_the_model_has_the_recipes_size(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == 265_536


@pytest.mark.parametrize("word", ["two words", "", " padded", "<|im_end|>"])
def test_an_invalid_word_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(ValueError, match="word"):
        write_tiny_policy(tmp_path, TinyPolicyConfig(), [*WORDS, word])
    assert not list(tmp_path.iterdir())


def test_heads_too_small_for_the_engine_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least 32"):
        TinyPolicyConfig(hidden_size=64, num_attention_heads=4)
