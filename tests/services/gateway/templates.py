"""A byte-level tokenizer with templates in the forms that models have, and policies that follow a script."""

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway.session import EpisodeSession, SessionLimits
from offbeat.services.messages.types import Completion, FinishReason, PromptImage, VersionSpan

START, END = "<|im_start|>", "<|im_end|>"

HERMES = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You help.' }}
    {%- endif %}
    {{- "\n\n# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- call.function.name }}
            {{- '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role != 'system' or not (tools and loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
"""As Qwen2.5's."""

FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END)])
    return tokenizer


def chat_template(text: str, start: str = "") -> ChatTemplate:
    """start: token that the tokenizer puts before a text."""
    tokenizer = byte_tokenizer()
    if start:
        special = [(start, tokenizer.token_to_id(start))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=text)

    def render(messages: Sequence[dict], tools: Sequence, prompt: bool) -> str:
        return fast.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )

    return ChatTemplate(render, tokenizer)


class Scripted:
    """A policy that says what `say` makes of the call's number; keeps every prompt that it was sent."""

    def __init__(self, template: ChatTemplate, say: Callable[[int], str] | Sequence[str]) -> None:
        self.template = template
        self.say = say if callable(say) else lambda number: say[number]
        self.sent: list[tuple[int, ...]] = []
        self.images: list[tuple[PromptImage, ...]] = []
        self.stops: list[tuple[str, ...]] = []
        self.made: list[Completion] = []

    async def __call__(
        self,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        images: tuple[PromptImage, ...] = (),
        stop_strings: tuple[str, ...] = (),
    ) -> Completion:
        self.stops.append(stop_strings)
        number = len(self.sent)
        self.sent.append(prompt)
        self.images.append(images)
        words = (*self.template.encode(self.say(number)), self.template.end_id)
        ids = words[:max_new_tokens]
        middle = max(1, len(ids) // 2)
        spans = (VersionSpan(0, middle, 2 * number), VersionSpan(middle, len(ids), 2 * number + 1))
        # each logprob encodes which answer and which of its tokens it belongs to
        made = Completion(
            "",
            ids,
            tuple(-(number + 1) - i / 1000 for i in range(len(ids))),
            spans if middle < len(ids) else spans[:1],
            FinishReason.STOP if len(ids) == len(words) else FinishReason.LENGTH,
        )
        self.made.append(made)
        return made


def session_of(policy: Scripted, **bounds: int) -> EpisodeSession:
    return EpisodeSession(
        policy.template, policy, SessionLimits(**{"sequence_length": 100_000, "max_new_tokens": 1000, **bounds})
    )
