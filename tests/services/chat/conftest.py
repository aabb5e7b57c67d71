"""Model folders whose chat templates write calls of functions in the forms that models have."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.services.gateway.templates import byte_tokenizer

WHOLE = """
{%- if tools %}<|im_start|>system
{% for m in messages if m.role == 'system' %}{{ m.content }}
{% endfor %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' or not tools %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}CALLS{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Around the calls of one answer, whose form is for_each_call model's own."""
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}WRITTEN{% if not loop.last %}BETWEEN{% endif %}{% endfor %}"


def for_each_call(written: str, between: str = "") -> str:
    return EACH.replace("WRITTEN", written).replace("BETWEEN", between)


JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2.5": (for_each_call(f"<tool_call>\n{JSON}\n</tool_call>", "\n"), ()),
    "llama3": (
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        + for_each_call('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'),
        (),
    ),
    "mistral": (
        "[TOOL_CALLS] ["
        + for_each_call(
            "{% if c.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}"
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}',
            ", ",
        )
        + "]",
        ("[TOOL_CALLS]",),
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>"
        + for_each_call(
            "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments }}"
            "\n```<｜tool▁call▁end｜>",
            "\n",
        )
        + "<｜tool▁calls▁end｜>",
        tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
    ),
    "granite": ("<|tool_call|>[" + for_each_call(JSON, ", ") + "]", ("<|tool_call|>",)),
    "phi4": ("functools[" + for_each_call(JSON, ", ") + "]", ()),
    "xlam": ("[" + for_each_call(JSON, ", ") + "]", ()),
    "llama4": (
        "["
        + for_each_call(
            "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
            "{{ ', ' if not loop.last }}{% endfor %})",
            ", ",
        )
        + "]",
        (),
    ),
    "qwen3_coder": (
        for_each_call(
            "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
            "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            "\n",
        ),
        ("<tool_call>", "</tool_call>"),
    ),
}
"""By the model whose form it is: the calls of an answer, and the tokens of them that are special."""


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a folder with a byte-level tokenizer and a template."""

    def write(template: str, special: tuple[str, ...] = ()) -> Path:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        folder = tmp_path_factory.mktemp("chat")
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, eos_token="<|im_end|>")
        fast.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def form(folder_of: Callable[..., Path]) -> Callable[[str], Path]:
    """The folder of one of `FORMS`."""

    def write(name: str) -> Path:
        calls, special = FORMS[name]
        return folder_of(WHOLE.replace("CALLS", calls), special)

    return write
