"""Assistant tokens by the published chat templates, against those that TRL's tagged copies of them mark."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from offbeat.services.chat.assistant_tokens import AssistantTokens

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: it is part of the dev extra", allow_module_level=True)

TEMPLATES = Path(next(iter(importlib.util.find_spec("trl").submodule_search_locations))) / "chat_templates"
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_vl": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "lfm2": "<|im_end|>",
}
"""Token that ends a turn, by template."""
ASKED = {"role": "user", "content": "Where is G ?"}
TURNS = [ASKED, {"role": "assistant", "content": "Down  of P."}, ASKED, {"role": "assistant", "content": "Right"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "G"}}}
CALLING = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "look", "content": "Down"},
    {"role": "assistant", "content": "Down ."},
]
CONVERSATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "turns": (TURNS, []),
    "answer first": (TURNS[1:], []),
    "calls": (CALLING, [TOOL]),
}
"""Messages and tools."""


def load(folder: Path, template: str, end: str) -> AssistantTokens:
    """A byte-level tokenizer with the template and its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = sorted(
        {"<bos>", "<|endoftext|>", *re.findall(r"<\|[a-z_]+\|>|<(?:start|end)_of_turn>", template)} | {end}
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(["Down"], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return AssistantTokens(folder)


def learned(tokens: AssistantTokens, messages: list[Any], tools: list[Any], *, last_only: bool = False) -> list[str]:
    ids, turns, _ = tokens.tokenize(messages, tools, last_only=last_only)
    return [tokens._backend.decode(ids[start:end], skip_special_tokens=False) for start, end in turns]


def squeeze(parts: list[str]) -> str:
    return "".join("".join(parts).split())


def marked(tokens: AssistantTokens, template: str, messages: list[Any], tools: list[Any]) -> tuple[str, list[str]]:
    """The text, and what the tags of TRL's template mark."""
    (text,), (spans,) = render_jinja_template(
        conversations=[messages],
        tools=tools or None,
        chat_template=template,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
        **tokens._tokenizer.special_tokens_map,
    )
    return text, [text[start:end] for start, end in spans]


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_learned_tokens_of_a_published_template_are_those_that_trl_marks(
    name: str, conversation: str, tmp_path: Path
) -> None:
    """Except for whitespace around them: the generation prompt's, or after the token that ends a turn."""
    published = (TEMPLATES / f"{name}.jinja").read_text()
    tagged = (TEMPLATES / f"{name}_training.jinja").read_text()
    messages, tools = CONVERSATIONS[conversation]
    if tools and "tools" not in published:
        pytest.skip("the template has no tools")
    if conversation == "answer first" and name == "gemma3":
        pytest.skip("the template demands a user's message first")
    ours = load(tmp_path, published, ENDS[name])
    last_only = name == "qwen3"  # leaves earlier thoughts out
    text, expected = marked(ours, tagged, messages, tools)
    got = learned(ours, messages, tools, last_only=last_only)
    assert squeeze(got) == squeeze(expected[-1:] if last_only else expected)
    assert len(got) == (1 if last_only else 2)
    assert got[0].endswith(ENDS[name])
    if not last_only:
        ids = ours.tokenize(messages, tools).tokens
        assert text.startswith(ours._backend.decode(ids, skip_special_tokens=False).rstrip())


@pytest.mark.parametrize("name", ENDS)
def test_a_tagged_template_is_followed(name: str, tmp_path: Path) -> None:
    tagged = (TEMPLATES / f"{name}_training.jinja").read_text()
    ours = load(tmp_path, tagged, ENDS[name])
    _, expected = marked(ours, tagged, TURNS, [])
    assert squeeze(learned(ours, TURNS, [])) == squeeze(expected)
