import sys

from tests.services.gateway.templates import PLAIN, chat_template


def test_whole_conversations_are_not_held_once_they_are_encoded():
    template = chat_template(PLAIN)
    conversation, phrase = "a long conversation " * 1000, "and now " * 3
    before = sys.getrefcount(conversation)
    assert template.encode(conversation) == template.encode("a long ") + template.encode(conversation[7:])
    assert sys.getrefcount(conversation) == before
    assert template.encode(phrase) is template.encode(phrase)
