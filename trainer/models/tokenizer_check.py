"""Tokenizer comparison."""

from pathlib import Path

from tokenizers import Tokenizer


def check_same_tokens(policy: Path, other: Path, path: str) -> None:
    """Check that token ids are equal. path: key of `other`.

    Raises:
        ValueError: an id differs, or tokenizer.json is missing.
    """
    policy_ids, other_ids = (_vocabulary(folder, path) for folder in (policy, other))
    if policy_ids != other_ids:
        differing = next(token for token in (*policy_ids, *other_ids) if policy_ids.get(token) != other_ids.get(token))
        raise ValueError(
            f"{path}: {other} has another tokenizer than the policy: {differing!r} is token "
            f"{other_ids.get(differing)} instead of {policy_ids.get(differing)}. Distillation "
            "needs equal tokenizers"
        )


def _vocabulary(folder: Path, path: str) -> dict[str, int]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{path}: {folder} has no tokenizer.json")
    return Tokenizer.from_file(str(file)).get_vocab()
