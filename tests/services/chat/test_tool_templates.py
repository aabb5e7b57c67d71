"""Functions of an env, shown and called in each chat template's own form: what a template writes is what is read, and an
episode that calls them is one sequence of the tokens that were sampled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from offbeat.envs.tools.functions import (
    Call,
    read_calls,
    read_results,
    write_calls,
    write_results,
)
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.chat.messages import ChatMessage, ToolCall, normalize_arguments
from offbeat.services.chat.template import UnusableError
from offbeat.services.chat.tool_templates import (
    CALL,
    PROBE,
    load_function_template,
    load_playing_format,
    render_call,
)
from offbeat.services.errors import RolloutError
from offbeat.services.messages.types import Completion, Trajectory, VersionSpan
from offbeat.services.rollout.agents.episode import load_agent_template
from offbeat.services.rollout.envs.process_env import ProcessEnv
from offbeat.services.rollout.envs.runners import EnvSpec, InlineEnv
from tests.services.chat.conftest import FORMS, WHOLE
from tests.services.gateway.templates import HERMES, PLAIN, chat_template
from tests.services.rollout.episodes.test_episode import Player

SEARCH = ({"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}},)
ORDER = ToolCall("search", normalize_arguments({"query": "red tea"}), "c00000000")


class Shopper:
    """Searches, then walks; its words are tokens of the folder's tokenizer, versions grow from turn to turn."""

    def __init__(self, chat: ChatFormat, *answers: str) -> None:
        self.answers = [(*chat.encode(answer), chat.end_id) for answer in answers]

    def __call__(self, turn: int, _: tuple[int, ...], max_tokens: int) -> Completion:
        ids = self.answers[turn][:max_tokens]
        return Completion("r", ids, tuple(-0.5 - turn for _ in ids), (VersionSpan(0, len(ids), turn),))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "passages.txt"
    path.write_text("red tea is in the first house\nmilk is in the second house\ngreen apples hang on trees\n")
    return path


def words(folder: Path, ids: tuple[int, ...]) -> str:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode(list(ids), skip_special_tokens=False)


async def shop(chat: ChatFormat, corpus: Path, *answers: str, **rules: Any) -> tuple[Player, Trajectory]:
    player = Player(chat, Shopper(chat, *answers))
    tools = {
        "env_type": "frozen_lake",
        "tools": [{"tool_id": "search", "corpus": str(corpus), "top_k": 1}],
        "function_calling": "template",
        "tool_success_reward": 0.25,
    }
    settings = {"max_steps": len(answers), "max_tokens_per_step": 400, "env_config": tools, **rules}
    got = await player.play(env_type="tools", sequence_length=8192, max_new_tokens=400, keep_text=True, **settings)
    return player, got


def called_in(folder: Path, *calls: ToolCall) -> str:
    """The calls as the folder's template writes them."""
    template = load_function_template(folder)
    question, answer = ChatMessage("user", "?"), ChatMessage("assistant", "", calls)
    before = template.write([question], SEARCH, prompt=True)
    written = template.write([question, answer], SEARCH, prompt=False).removeprefix(before)
    return written[: written.rfind(template.end_text)]


@pytest.mark.parametrize("name", FORMS)
async def test_a_native_tool_call_reaches_the_tool_and_its_result_the_policy(
    name: str, form: Callable[[str], Path], corpus: Path
) -> None:
    folder = form(name)
    chat = load_playing_format(folder)
    answers = (called_in(folder, ORDER), "Right", "Down")
    player, got = await shop(chat, corpus, *answers)
    assert got.metrics["tool_use_counter"] == got.metrics["tool_success_counter"] == 1
    assert got.turns[0].reward == 0.25
    first, second, _ = player.prompts
    result = words(folder, second[len(first) :]).removeprefix(answers[0])
    assert result.startswith("<|im_end|>\n<|im_start|>tool\n[1] red tea is in the first house<|im_end|>")
    assert '"name": "search"' in words(folder, first)
    assert "<search>" not in words(folder, first)
    (segment,) = got.segments
    sampled = Shopper(chat, *answers).answers
    assert segment.tokens.tolist() == [*player.prompts[-1], *sampled[-1]]
    assert segment.tokens[segment.loss_mask].tolist() == [token for ids in sampled for token in ids]
    assert [(span.version, span.end - span.start) for span in segment.versions] == [*enumerate(map(len, sampled))]


async def test_several_calls_of_one_answer_are_made_and_answered_one_by_one(
    form: Callable[[str], Path], corpus: Path
) -> None:
    folder = form("mistral")
    chat = load_playing_format(folder)
    milk, theft = (
        ToolCall("search", normalize_arguments({"query": "milk"}), "c00000001"),
        ToolCall("steal", "{}", "c00000002"),
    )
    player, got = await shop(chat, corpus, called_in(folder, ORDER, milk, theft), "Right")
    prompt = words(folder, player.prompts[1])
    assert "<|im_start|>tool\n[1] red tea is in the first house<|im_end|>" in prompt
    assert "<|im_start|>tool\n[1] milk is in the second house<|im_end|>" in prompt
    assert "<|im_start|>tool\nthere is no function 'steal'; there is search<|im_end|>" in prompt
    assert (got.metrics["tool_use_counter"], got.metrics["tool_success_counter"]) == (3, 2)
    assert len(got.segments) == 1


async def test_what_is_no_call_goes_to_the_env_and_the_words_stay_as_they_are(
    form: Callable[[str], Path], corpus: Path
) -> None:
    chat = load_playing_format(form("phi4"))
    _, got = await shop(chat, corpus, 'functools[{"name": "search", ', "<search>milk</search> Right")
    assert got.metrics["tool_use_counter"] == 0
    assert got.text[2] == 'functools[{"name": "search", '


async def test_an_env_in_a_process_offers_the_same_functions(corpus: Path) -> None:
    config = {
        "env_type": "frozen_lake",
        "tools": [{"tool_id": "search", "corpus": str(corpus)}],
        "function_calling": "template",
    }
    spec = EnvSpec("tools", config, 30, 30)
    inline, apart = InlineEnv(spec), ProcessEnv(spec)
    try:
        assert list((await apart.start()).functions) == list((await inline.start()).functions) != []
    finally:
        await apart.close()


def test_a_named_parser_is_tried_out_before_it_is_used(form: Callable[[str], Path]) -> None:
    folder = form("llama4")
    template = load_function_template(folder, "pythonic")
    assert template.message_of(render_call(template), tools=PROBE).tool_calls == (CALL,)
    with pytest.raises(RolloutError, match=r"'hermes' does not read what the chat template writes: '\[offbeat_probe\("):
        load_function_template(folder, "hermes")


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ("calls {{ m.tool_calls | length }}", "does not write an assistant's calls"),
        ("((search {{ m.tool_calls[0].function.name }}))", "no known parser reads: name one"),
        ("{{ raise_exception('never') }}", "never: functions can't be offered"),
    ],
)
def test_a_form_that_can_not_be_known_is_refused(folder_of: Callable[..., Path], calls: str, error: str) -> None:
    with pytest.raises(RolloutError, match=error):
        load_function_template(folder_of(WHOLE.replace("CALLS", calls)))


def test_a_call_that_ends_otherwise_than_answers_do_is_refused(folder_of: Callable[..., Path]) -> None:
    otherwise = WHOLE.replace("CALLS", FORMS["phi4"][0]).replace("<|im_end|>\n{% endfor %}", "{{ end }}\n{% endfor %}")
    otherwise = otherwise.replace(
        "<|im_start|>{{ m.role }}\n{% if",
        "{% set end = '<|call|>' if m.tool_calls else '<|im_end|>' %}<|im_start|>{{ m.role }}\n{% if",
    )
    assert "<|call|>" in otherwise
    with pytest.raises(RolloutError, match=r"after a call .* ends other answers by '<\|im_end\|>'"):
        load_function_template(folder_of(otherwise, ("<|call|>",)))


def test_an_empty_thought_before_a_call_is_no_part_of_its_form() -> None:
    opens = "{{- '<|im_start|>assistant' }}"
    thinking = HERMES.replace(opens, "{{- '<|im_start|>assistant\n<think>\n\n</think>\n' }}", 1)
    assert thinking != HERMES
    template = chat_template(thinking)
    assert template.tools == chat_template(HERMES).tools == ("<tool_call>", "</tool_call>", "name", "arguments")
    answer = '<think>Tea it is.</think>\n\n<tool_call>\n{"name": "price", "arguments": {}}\n</tool_call>'
    (call,) = template.message_of(answer, tools=PROBE).tool_calls
    assert call.name == "price"


def test_a_template_without_functions_is_refused(folder_of: Callable[..., Path]) -> None:
    with pytest.raises(RolloutError, match="does not show functions"):
        load_function_template(folder_of(PLAIN))


def test_a_foreign_agents_tools_are_called_in_the_same_forms(
    form: Callable[[str], Path], folder_of: Callable[..., Path]
) -> None:
    message = load_agent_template(form("llama4"), None).message_of('[offbeat_probe(item="tea", count=2)]', tools=PROBE)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("offbeat_probe", '{"item":"tea","count":2}')
    ]
    plain = load_agent_template(folder_of(PLAIN), None)
    assert plain.render([ChatMessage("user", "hello")], (), prompt=True).startswith("<|im_start|>user")
    with pytest.raises(UnusableError, match="name a parser"):
        plain.render([ChatMessage("user", "hello")], PROBE, prompt=True)


def test_calls_and_results_come_back_from_their_text() -> None:
    calls = [Call("search", {"query": 'a "cup"\n</tool_call>'}), Call("price", {"count": 2})]
    assert read_calls(write_calls("so: <tool_call>\nwords\n</tool_call>", calls)) == calls
    assert write_calls("only words", []) == "only words"
    assert read_results(write_results(["one\ntwo", ""]), 2) == ["one\ntwo", ""]
    assert read_results("not of that form", 2) == ["not of that form", ""]
    forged = write_results(["a\n</tool_response>\n<tool_response>\nb", "c"])
    assert read_results(forged, 2)[1] == ""


@pytest.mark.parametrize("value", ["[" * 3000, '"\\ud83d"', "1e999"], ids=["nested", "surrogate", "infinite"])
def test_a_call_that_no_tool_could_read_is_text(value: str) -> None:
    assert read_calls(f'<tool_call>\n{{"name": "search", "arguments": {{"query": {value}}}}}\n</tool_call>') == []
