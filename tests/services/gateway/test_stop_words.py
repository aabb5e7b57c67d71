"""Ends of answers by stop words, in time that does not grow with the square of their tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.openai_chat import _text_logprobs
from offbeat.services.gateway.session import ModelReply
from offbeat.services.messages.types import Completion, VersionSpan
from tests.services.gateway.templates import PLAIN, Scripted, chat_template, session_of
from tests.services.gateway.test_images import body, post, user

TEMPLATE = chat_template(PLAIN)


def completion_of(text: str) -> Completion:
    """Return a token for each byte."""
    ids = tuple(TEMPLATE.encode(text))
    return Completion("", ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 0),))


@given(st.text("ab é漢", max_size=30), st.sampled_from(["STOP", "🦊", "\n\n"]), st.text("ab é漢🦊", max_size=30))
def test_the_first_tokens_that_hold_a_stop_word_are_kept(before: str, stop: str, after: str) -> None:
    answer, session = completion_of(before + stop + after), session_of(Scripted(TEMPLATE, []))
    kept, text, word = session._until_stop(answer, (stop,))
    assert (text, word) == (before, stop)
    assert kept == len((before + stop).encode())


def test_a_stop_word_may_be_a_special_token_which_answers_have_without_text() -> None:
    answer, session = completion_of(f"one{TEMPLATE.end_text}two"), session_of(Scripted(TEMPLATE, []))
    assert session._until_stop(answer, (TEMPLATE.end_text, "two")) == (4, "one", TEMPLATE.end_text)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("stop", "problem"), [(["a"] * 65, "65 texts"), (["b" * 513], "a text of 513 characters")])
async def test_more_stop_words_than_an_engine_compares_are_refused(path: str, stop: list[str], problem: str) -> None:
    key = "stop_sequences" if path == "/v1/messages" else "stop"
    session = session_of(Scripted(TEMPLATE, []))
    response = await post(session, path, {"prompt": "a", **body(path, user(path, "a")), key: stop})
    assert (response.status_code, f"{key} has {problem}" in response.text) == (400, True)


def test_a_late_stop_word_is_found_by_few_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, session = completion_of("é" * 4000 + "HALT"), session_of(Scripted(TEMPLATE, []))
    decoded, whole_text = list[int](), ChatTemplate.whole_text
    monkeypatch.setattr(ChatTemplate, "whole_text", lambda self, ids: decoded.append(len(ids)) or whole_text(self, ids))
    assert session._until_stop(answer, ("HALT",))[0] == 8004
    assert 0 < len(decoded) < 20


def test_the_tokens_of_later_calls_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, session = completion_of("many words without any end"), session_of(Scripted(TEMPLATE, []))
    assert session._until_stop(answer, ("no such word",))[2] == ""
    decoded, whole_text = list[int](), ChatTemplate.whole_text
    monkeypatch.setattr(ChatTemplate, "whole_text", lambda self, ids: decoded.append(len(ids)) or whole_text(self, ids))
    other = session_of(Scripted(TEMPLATE, []))
    assert other._until_stop(answer, ("no such word",))[2] == ""
    assert not decoded


@pytest.mark.parametrize("texts", [(), ("a",), ("a", "bc", "", "d")])
def test_offsets_of_tokens_are_those_of_their_texts(texts: tuple[str, ...]) -> None:
    count = len(texts)
    reply = ModelReply(None, None, (0,) * count, (0.0,) * count, texts, "stop", "", prompt_ids=())  # type: ignore[arg-type]
    assert _text_logprobs(reply)["text_offset"] == [len("".join(texts[:i])) for i in range(count)]
