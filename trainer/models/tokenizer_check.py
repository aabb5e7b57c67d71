"""Comparison of two models' tokenizers."""

from pathlib import Path

from tokenizers import Tokenizer


def check_same_tokens(policy: Path, other: Path, path: str) -> None:
    """Check that two model folders have the same token ids. path: configuration key of `other`.

    Raises:
        ValueError: a token's id differs, or a folder has no tokenizer.json.
    """
    ours, theirs = (_vocabulary(folder, path) for folder in (policy, other))
    if ours != theirs:
        odd = next(token for token in (*ours, *theirs) if ours.get(token) != theirs.get(token))
        raise ValueError(
            f"{path}: {other} has another tokenizer than the policy: {odd!r} is token {theirs.get(odd)} there and "
            f"{ours.get(odd)} here. On-policy distillation needs the same"
        )


def _vocabulary(folder: Path, path: str) -> dict[str, int]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{path}: {folder} holds no tokenizer.json to compare tokens by")
    return Tokenizer.from_file(str(file)).get_vocab()
