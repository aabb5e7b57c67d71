from pathlib import Path

import pytest

from offbeat.services.chat.tokenizer import find_end_ids


class Tokenizer:
    eos_token_id: int | None = 7


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (None, (7,)),
        ("{}", (7,)),
        ('{"eos_token_id": 9}', (7, 9)),
        ('{"eos_token_id": [7, 9]}', (7, 9)),
        ('{"eos_token_id": null}', (7,)),
        ("[", (7,)),
        ("[1]", (7,)),
    ],
)
def test_ends_are_those_of_the_tokenizer_and_of_generation(tmp_path: Path, text: str | None, ids: tuple[int, ...]):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert find_end_ids(tmp_path, Tokenizer()) == ids


def test_a_tokenizer_without_an_end_has_none(tmp_path: Path):
    tokenizer = Tokenizer()
    tokenizer.eos_token_id = None
    assert find_end_ids(tmp_path, tokenizer) == ()
