"""Published chat templates of families: their pieces are the template's tokens, or they are refused with what to take."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.errors import RolloutError
from tests.services.gateway.templates import byte_tokenizer

SPEC = importlib.util.find_spec("trl")
if SPEC is None or not SPEC.submodule_search_locations:
    pytest.skip("TRL is not installed: it is part of the dev extra", allow_module_level=True)

TEMPLATES = Path(SPEC.submodule_search_locations[0]) / "chat_templates"
HARMONY = ("gptoss", "muse_glimmer")
NO_SYSTEM = ("gemma",)
APPEND_ONLY = (
    *("cohere", "cohere2", "gemma", "gemma3", "gemma4", "llama3", "llama3_1", "llama3_2", "phi3", "phi3_5"),
    *("lfm2", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"),
)
REWRITING = (
    *("deepseek_r1_distill", "deepseekv3", "glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_8"),
    *("lfm2_2_5", "qwen3_5_nothink"),
)
MARKS = r"<\|[^|'\"{}]+\|>|</?(?:start|end)_of_\w+>|</?s>|<｜[^｜]+｜>|<[|]?turn[|]?>|<eos>|<bos>"


class Published:
    """A byte-level tokenizer with a published template and its special tokens."""

    def __init__(self, name: str) -> None:
        template = (TEMPLATES / f"{name}.jinja").read_text()
        self.tokenizer = byte_tokenizer()
        special = sorted({"<s>", "</s>", *re.findall(MARKS, template)})
        self.tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        self._hf = PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
        )
        self.chat = ChatFormat(
            lambda messages, prompt: self.render(messages, (), prompt),
            self.tokenizer,
            template=lambda: ChatTemplate(self.render, self.tokenizer),
        )

    def render(self, messages: Sequence[Any], tools: Sequence[Any], prompt: bool) -> str:
        settings: dict[str, Any] = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": prompt}
        return cast(str, self._hf.apply_chat_template(list(messages), **settings))

    def encode(self, system: str, *contents: str) -> list[int]:
        head = [{"role": "system", "content": system}] if system else []
        turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
        return self.tokenizer.encode(self.render(head + turns, (), True), add_special_tokens=False).ids


@pytest.mark.parametrize("name", [*APPEND_ONLY, *REWRITING])
def test_prompts_have_the_templates_tokens(name: str) -> None:
    policy = Published(name)
    chat, first, later = policy.chat, " \n O _\n", "\tG \n\n"
    assert bool(chat.rewrites) == (name in REWRITING)
    for system in ("",) if name in NO_SYSTEM else ("", "\n Be brief. \n"):
        ids = chat.first_prompt(system, first)
        assert list(ids) == policy.encode(system, first)
        if not chat.rewrites:
            answer = (*policy.tokenizer.encode("Up", add_special_tokens=False).ids, chat.end_id)
            assert [*ids, *answer, *chat.next_prompt(later)] == policy.encode(system, first, "Up", later)


@pytest.mark.parametrize("name", HARMONY)
def test_thoughts_and_answers_of_two_messages_are_refused(name: str) -> None:
    """Harmony's `<|end|>` ends a message, so that an answer would end after its analysis."""
    with pytest.raises(RolloutError, match=r"two messages.*take a model that thinks and answers in one, such as Qwen3"):
        Published(name)
