"""Where an answer ends: with the first token that completes a stop string in its decoded text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from offbeat.services.chat.stops import StopStrings, cut_completion, load_decoder, stop_strings_of
from offbeat.services.errors import RolloutError
from offbeat.services.messages.types import Completion, FinishReason, VersionSpan
from tests.integration.policy_weights import write_policy


def byte_tokenizer() -> Tokenizer:
    """Bytes, some words of several characters, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["</", "search", ">\u010a", ">>", "ch>", "\u0120<"]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def space_tokenizer() -> Tokenizer:
    """Words with the space before them, which a text's first one loses, and bytes, as Llama 2's."""
    words = ["\u2581a", "\u2581b", "a", "b", "\u2581", "c", *(f"<0x{byte:02X}>" for byte in "\u3002".encode())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"bytes": byte_tokenizer(), "spaces": space_tokenizer()}
STOPS = {
    "bytes": ["</search>", ">\n", "\u3002", "<|end|>", "\n\n", "d e"],
    "spaces": ["b a", " ", "a", "cb", "\u3002", "c\u3002"],
}


def decode(name: str, tokens: Sequence[int]) -> str:
    return TOKENIZERS[name].decode(list(tokens), skip_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_a_check_of_each_token_finds_the_first_text_with_a_stop_string(name: str, data: st.DataObject) -> None:
    """The engines' check, and the search in a whole answer, against decoding every prefix."""
    stops = data.draw(st.lists(st.sampled_from(STOPS[name]), min_size=1, max_size=3))
    tokenizer = TOKENIZERS[name]
    pieces = [tokenizer.encode(stop).ids for stop in STOPS[name]] if name == "bytes" else [[0, 1], [6, 7, 8]]
    token = st.integers(0, tokenizer.get_vocab_size() + 1).map(lambda token: [token])
    drawn = data.draw(st.lists(st.one_of(token, st.sampled_from(pieces)), min_size=1, max_size=40))
    tokens = [token for piece in drawn for token in piece]
    rules = StopStrings(lambda tokens: decode(name, tokens), stops)
    prefixes = (n for n in range(1, len(tokens) + 1) if any(stop in decode(name, tokens[:n]) for stop in stops))
    expected = next(prefixes, None)
    assert next((n for n in range(1, len(tokens) + 1) if rules.is_end(tokens[:n])), None) == expected
    assert rules.find_end(tokens) == expected


def test_most_tokens_are_not_decoded_again() -> None:
    decoded: list[Sequence[int]] = []

    def count(tokens: Sequence[int]) -> str:
        decoded.append(tokens)
        return decode("bytes", tokens)

    rules = StopStrings(count, ["</search>"])
    words = TOKENIZERS["bytes"].encode("some words that end in nothing " * 20).ids
    for n in range(1, len(words)):
        assert not rules.is_end(words[:n])
    assert len(decoded) == len(set(words)), "each token once"


def test_a_folder_without_tokenizer_has_no_stop_strings(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="no tokenizer"):
        stop_strings_of(tmp_path, ("x",))
    write_policy(tmp_path)
    assert load_decoder(tmp_path)((2, 7)) == "<|im_start|> w0"
    assert stop_strings_of(tmp_path, ("w0 w1",)).find_end((7, 7, 8, 7)) == 3


def test_a_cut_answer_keeps_the_versions_of_its_tokens() -> None:
    spans = (VersionSpan(0, 2, 5), VersionSpan(2, 3, 6), VersionSpan(3, 4, 7))
    whole = Completion("r", (1, 2, 3, 4), (-1.0, -2.0, -3.0, -4.0), spans, FinishReason.LENGTH)
    cut = Completion("r", (1, 2, 3), (-1.0, -2.0, -3.0), spans[:2], FinishReason.STOP)
    assert cut_completion(whole, 3) == cut
    assert cut_completion(whole, 1).versions == (VersionSpan(0, 1, 5),)


def test_a_cut_answer_keeps_the_experts_of_its_tokens_but_the_last() -> None:
    routing = np.arange(5, dtype=np.uint8).reshape(5, 1, 1)  # of a prompt of two tokens, and of three of the answer
    whole = Completion("r", (1, 2, 3, 4), (-1.0,) * 4, (VersionSpan(0, 4, 5),), routing=routing)
    for end, last in ((4, 4), (3, 3), (1, 1)):
        kept = cut_completion(whole, end).routing
        assert kept is not None
        assert kept[-1] == last
