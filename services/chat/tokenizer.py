"""Tokenizer of a model folder."""

from pathlib import Path
from typing import Any

from offbeat.services.errors import RolloutError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> Any:
    """Load tokenizer.json, else transformers' class.

    `AutoTokenizer` imports torch, and ignores tokenizer.json for some architectures.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise RolloutError(f"no tokenizer in {folder}: none of {', '.join(TOKENIZER_FILES)} is there")
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RolloutError(f"no tokenizer in {folder}: {error}") from error
