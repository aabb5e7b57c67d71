import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from offbeat.envs.frozen_lake import WORDS
from offbeat.services.chat.append_only import ChatFormat, Render, load_chat_format
from offbeat.services.errors import RolloutError
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>", "[INST]", "[/INST]"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
)
TRIMMING = (
    "<s>{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
WITHOUT_SYSTEM = (
    "<s>{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% elif m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
STRIPS_EARLIER = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'][-3:] }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_LAST = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.s = m['content'] %}"
    "{% elif m['role'] == 'user' %}[INST] {% if loop.last %}{{ ns.s }} {% endif %}{{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chatml_of(system: str, user: str) -> str:
    """ChatML whose contents are expressions of `c`."""
    content = f"{{% if m['role'] == 'system' %}}{{{{ {system} }}}}{{% elif m['role'] == 'user' %}}{{{{ {user} }}}}"
    content = "{% set c = m['content'] %}" + content + "{% else %}{{ c }}{% endif %}"
    return CHATML.replace("{{ m['content'] }}", content)


STRIPPING = {
    "gemma 3": chatml_of("c", "c | trim"),
    "smollm3": chatml_of("c.rstrip()", "c"),
    "system alone": chatml_of("c | trim", "c"),
    "newlines": chatml_of("c", "c.strip('\\n')"),
    "spaces around": chatml_of("' ' + c.lstrip() + ' '", "' ' + c | trim + ' '"),
}

APPEND_ONLY = {"chatml": CHATML, "qwen": QWEN_DEFAULT_SYSTEM, "trimming": TRIMMING}
CONVERSATION = [
    ("P _\n_ G", "Down"),
    (" 0 1 Left # ", "I think.\nUp"),
    ("\nYou have 3 apples: 'a', 'b'.\n", "go  north"),
    ("The end", "Left"),
]


def render_of(template: str) -> Render:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    compiled = environment.from_string(template)
    return lambda messages, prompt: compiled.render(messages=messages, add_generation_prompt=prompt)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer as real models have one."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([f"{a} {b}\n\nassistant user system You think" for a, b in CONVERSATION] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def encode_whole(render: Render, tokenizer: Tokenizer, system: str, turns: list[tuple[str, str]]) -> list[int]:
    messages = [{"role": "system", "content": system}] if system else []
    for observation, answer in turns:
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": answer}]
    return tokenizer.encode(render(messages, False), add_special_tokens=False).ids


def encode_pieces(chat: ChatFormat, tokenizer: Tokenizer, system: str, turns: list[tuple[str, str]]) -> list[int]:
    ids = list(chat.first_prompt(system, turns[0][0]))
    for i, (observation, answer) in enumerate(turns):
        if i:
            ids += chat.next_prompt(observation)
        ids += [*tokenizer.encode(answer, add_special_tokens=False).ids, chat.end_id]
    return ids


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("name", APPEND_ONLY)
@pytest.mark.parametrize("num_turns", [1, 2, 4])
def test_pieces_put_together_are_the_whole_conversation(byte_level: Tokenizer, name: str, system: str, num_turns: int):
    render = render_of(APPEND_ONLY[name])
    chat = ChatFormat(render, byte_level)
    ids = encode_pieces(chat, byte_level, system, CONVERSATION[:num_turns])
    full = encode_whole(render, byte_level, system, CONVERSATION[:num_turns])
    assert full[: len(ids)] == ids
    assert len(full) - len(ids) <= 1  # at most the line end after the last turn


def test_templates_without_system_messages_serve_plain_conversations(byte_level: Tokenizer):
    render = render_of(WITHOUT_SYSTEM)
    chat = ChatFormat(render, byte_level)
    assert encode_pieces(chat, byte_level, "", CONVERSATION) == encode_whole(render, byte_level, "", CONVERSATION)
    with pytest.raises(RolloutError, match="no system message: set agent_system_template"):
        chat.first_prompt("Be brief.", "P")


@pytest.mark.parametrize("name", STRIPPING)
def test_space_is_stripped_where_the_template_strips_it(byte_level: Tokenizer, name: str):
    """By message: the system's, observations', left and right."""
    render = render_of(STRIPPING[name])
    chat = ChatFormat(render, byte_level)
    for system in ("", "\n Be brief.\n\n"):
        ids = encode_pieces(chat, byte_level, system, CONVERSATION)
        assert encode_whole(render, byte_level, system, CONVERSATION)[: len(ids)] == ids


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (STRIPS_EARLIER, "not append-only"),
        (SYSTEM_LAST, "not append-only|times, not once"),
        (NO_END, "no special token"),
        ("{{ messages[0]['content'] }}", "not append-only|times, not once"),
    ],
)
def test_a_template_that_cannot_work_is_refused_in_words(byte_level: Tokenizer, template: str, why: str):
    with pytest.raises(RolloutError, match=why):
        ChatFormat(render_of(template), byte_level)


def test_answers_are_decoded_without_special_tokens(byte_level: Tokenizer):
    chat = ChatFormat(render_of(CHATML), byte_level)
    ids = (*byte_level.encode("I think.\nUp").ids, chat.end_id)
    assert chat.answer(ids) == "I think.\nUp"


def test_long_texts_are_right_too(byte_level: Tokenizer):
    render = render_of(CHATML)
    chat = ChatFormat(render, byte_level)
    turns = [("word " * 1000, "Down"), ("more " * 1000, "Up")]
    ids = encode_pieces(chat, byte_level, "", turns)
    assert encode_whole(render, byte_level, "", turns)[: len(ids)] == ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_policy(tmp_path, TinyPolicyConfig(), WORDS)
    return tmp_path


def test_the_tiny_policys_folder_is_read(folder: Path):
    chat = load_chat_format(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert chat.end_id == tokenizer.token_to_id("<|im_end|>")
    assert chat.stop_ids == (chat.end_id,)
    assert chat.answer((tokenizer.token_to_id("Down"), chat.end_id)) == "Down"
    prompt = chat.first_prompt("Walk P to G . Avoid O .", "P G\n0 0 Left # Down # Right G Up #")
    assert tokenizer.token_to_id("<unk>") not in prompt


def test_what_the_tokenizer_file_would_cut_off_or_pad_is_kept(folder: Path):
    tree: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    tree["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    assert len(load_chat_format(folder).first_prompt("Walk P to G", "P _ _ _")) > 8


def test_a_folder_without_tokenizer_or_template_is_refused(tmp_path: Path, folder: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RolloutError, match="no tokenizer"):
        load_chat_format(empty)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RolloutError, match="without a chat template"):
        load_chat_format(folder)
