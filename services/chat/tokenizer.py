import json
from pathlib import Path
from typing import Any

from offbeat.services.errors import RolloutError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def find_end_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens of tokenizer and generation_config.json."""
    try:
        settings = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        settings = {}
    named = settings.get("eos_token_id") if isinstance(settings, dict) else None
    ids = (tokenizer.eos_token_id, *(named if isinstance(named, list) else [named]))
    return tuple(dict.fromkeys(each for each in ids if isinstance(each, int)))


def load_tokenizer(folder: Path) -> Any:
    """Load tokenizer.json, else transformers' class.

    `AutoTokenizer` ignores tokenizer.json for some architectures.
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


def require_template(folder: Path, tokenizer: Any) -> None:
    """Raise RolloutError unless the tokenizer has a chat template that parses."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if tokenizer.chat_template is None:
        raise RolloutError(f"{folder} has a tokenizer without a chat template: put one into chat_template.jinja")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise RolloutError(f"the chat template of {folder}, line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError, ValueError, KeyError):
        return  # whatever this message lacks
