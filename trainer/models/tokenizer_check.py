"""Whether two models mean the same by a token id."""

from pathlib import Path

from tokenizers import Tokenizer


def check_same_tokens(policy: Path, other: Path, path: str) -> None:
    """Hold the tokenizers of two model folders against each other. path: the configuration key that named `other`.

    Raises:
        ValueError: a token has another id, or one of them has no tokenizer.json.
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
