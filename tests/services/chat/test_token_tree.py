import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.services.chat.capture import Captured
from offbeat.services.chat.messages import ChatMessage, ToolCall, normalize_arguments
from offbeat.services.chat.template import ChatTemplate, UnusableError
from offbeat.services.gateway.session import EpisodeSession, InvalidCallError, ModelRequest
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import Segment, StopReason, Trajectory
from tests.copying import replace
from tests.services.gateway.templates import (
    END,
    PLAIN,
    START,
    Scripted,
    chat_template,
    session_of,
)

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm",  "day": 1}}\n</tool_call>'


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str) -> ChatMessage:
    return ChatMessage("assistant", text)


async def ask(session: EpisodeSession, *messages: ChatMessage, **how) -> ChatMessage:
    replies = await session.answer(ModelRequest(messages, **how))
    session.deliver(replies)
    return replies[0].message


def trained(segment: Segment) -> list[int]:
    return segment.tokens[segment.loss_mask].tolist()


def as_trajectory(captured: Captured) -> Trajectory:
    return Trajectory(
        "g", 0, 0, "t", 1, captured.segments, captured.turns, StopReason.TERMINATED, dict(captured.metrics)
    )


async def converse(session: EpisodeSession) -> Captured:
    """Ask three times, each time with all that was said before."""
    messages = [user("a")]
    for word in ("b", "c", "d"):
        messages += [await ask(session, *messages), user(word)]
    return session.close()


async def test_a_linear_conversation_is_one_sequence_of_the_sent_tokens(plain: ChatTemplate):
    policy = Scripted(plain, ["one", "two", "three"])
    session = session_of(policy)
    captured = await converse(session)
    (segment,) = captured.segments
    assert segment.tokens.tolist() == [*policy.sent[2], *policy.made[2].token_ids]
    assert [policy.sent[i + 1][: len(policy.sent[i])] == policy.sent[i] for i in range(2)] == [True, True]
    assert trained(segment) == [token for made in policy.made for token in made.token_ids]
    assert captured.metrics["unverified_messages"] == 0
    assert [turn.segment for turn in captured.turns] == [0, 0, 0]


async def test_the_text_that_is_sent_is_the_one_that_the_template_gives(hermes: ChatTemplate):
    policy = Scripted(hermes, ["one", CALL, "three"])
    session = session_of(policy)
    messages = [user("a")]
    for new in (user("b"), ChatMessage("tool", "fine", tool_call_id="x"), user("d")):
        messages += [await ask(session, *messages, tools=(WEATHER,)), new]
    for number, prompt in enumerate(policy.sent):
        text = hermes.render(messages[: 2 * number + 1], (WEATHER,), prompt=True)
        sent = "".join(hermes.token_text(i) for i in prompt)
        assert sent.replace("  ", " ") == text, "but for the space that the policy itself put into its JSON"
    assert len(session.close().segments) == 1


@pytest.mark.parametrize("closing", ["</s>", END])
async def test_a_template_that_closes_a_conversation_continues_it(closing: str):
    """As Phi-3's."""
    closes = PLAIN.replace("{% endif %}", f"{{% else %}}{closing}{{% endif %}}")
    policy = Scripted(chat_template(closes), ["one", "two", "three"])
    session = session_of(policy)
    captured = await converse(session)
    (segment,) = captured.segments
    assert trained(segment) == [token for made in policy.made for token in made.token_ids]
    assert captured.metrics["unverified_messages"] == 0


@pytest.mark.parametrize(
    "comes_back",
    [
        lambda message: replace(message, content=f" {message.content}\n"),
        lambda message: message,
    ],
)
async def test_whitespace_around_a_returned_answer_keeps_its_tokens(plain: ChatTemplate, comes_back):
    policy = Scripted(plain, ["  one ", "two"])
    session = session_of(policy)
    first = await ask(session, user("a"))
    await ask(session, user("a"), comes_back(first), user("b"))
    assert len(session.close().segments) == 1
    assert policy.sent[1][: len(policy.sent[0]) + len(policy.made[0].token_ids)] == (
        *policy.sent[0],
        *policy.made[0].token_ids,
    )


async def test_tool_calls_that_come_back_as_other_json_are_known_again(hermes: ChatTemplate):
    policy = Scripted(hermes, [f"Let me look. {CALL}", "Rain."])
    session = session_of(policy)
    first = await ask(session, user("a"), tools=(WEATHER,))
    assert first.content == "Let me look."
    assert [(call.name, call.parsed()) for call in first.tool_calls] == [("weather", {"city": "Ulm", "day": 1})]
    back = replace(first, tool_calls=(ToolCall("weather", normalize_arguments('{"day": 1, "city":"Ulm"}')),))
    await ask(session, user("a"), back, ChatMessage("tool", "rain"), tools=(WEATHER,))
    captured = session.close()
    assert len(captured.segments) == 1
    assert captured.metrics["unverified_messages"] == 0


@pytest.mark.parametrize("said", ["Rain.", CALL])
async def test_a_call_without_the_use_of_its_tools_continues_the_conversation(hermes: ChatTemplate, said: str):
    """With `tool_choice: none` the tools stay in the prompt, as in vLLM, and calls of them are text."""
    policy = Scripted(hermes, [CALL, said, "Bye."])
    session = session_of(policy)
    first = await ask(session, user("a"), tools=(WEATHER,))
    history = (user("a"), first, ChatMessage("tool", "rain"))
    answer = await ask(session, *history, tools=(WEATHER,), reads_calls=False)
    assert (answer.content, answer.tool_calls) == (said, ())
    await ask(session, *history, answer, user("b"), tools=(WEATHER,), reads_calls=False)
    captured = session.close()
    assert (len(captured.segments), captured.metrics["unverified_messages"]) == (1, 0)


async def test_unused_tools_are_left_out_where_the_template_knows_none(plain: ChatTemplate):
    session = session_of(Scripted(plain, ["one"]))
    assert (await ask(session, user("a"), tools=(WEATHER,), reads_calls=False)).content == "one"


async def test_a_history_that_was_rewritten_begins_a_sequence_of_its_own(plain: ChatTemplate):
    policy = Scripted(plain, ["one", "two", "three"])
    session = session_of(policy)
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"))
    await ask(session, user("summary: a, one, b"))
    captured = session.close()
    assert [trained(segment) for segment in captured.segments] == [
        [*policy.made[0].token_ids, *policy.made[1].token_ids],
        [*policy.made[2].token_ids],
    ]


async def test_words_that_the_policy_did_not_say_are_context_and_counted(plain: ChatTemplate):
    policy = Scripted(plain, ["one", "two"])
    session = session_of(policy)
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"), assistant("never said"), user("c"))
    captured = session.close()
    (segment,) = captured.segments
    assert trained(segment) == [token for made in policy.made for token in made.token_ids]
    assert captured.metrics["unverified_messages"] == 1


@pytest.mark.parametrize("head", [(), (ChatMessage("system", "s"),)], ids=["first", "after the system message"])
async def test_a_conversation_may_begin_with_a_greeting(head: tuple[ChatMessage, ...]):
    """Neither no message nor a system message alone can be rendered."""
    needs_user = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no') }}{% endif %}"
    )
    policy = Scripted(chat_template(needs_user + PLAIN), ["one", "two"])
    session = session_of(policy)
    messages = [*head, assistant("How can I help?"), user("a")]
    messages += [await ask(session, *messages), user("b")]
    await ask(session, *messages)
    captured = session.close()
    (segment,) = captured.segments
    assert trained(segment) == [t for made in policy.made for t in made.token_ids]
    assert captured.metrics["unverified_messages"] == 1


async def test_branches_share_their_stem_and_train_it_once(plain: ChatTemplate):
    policy = Scripted(plain, ["stem", "left", "right"])
    session = session_of(policy)
    stem = await ask(session, user("a"))
    await ask(session, user("a"), stem, user("l"))
    await ask(session, user("a"), stem, user("r"))
    left, right = session.close().segments
    assert trained(left) == [*policy.made[0].token_ids, *policy.made[1].token_ids]
    assert trained(right) == [*policy.made[2].token_ids]
    assert right.tokens.tolist() == [*policy.sent[2], *policy.made[2].token_ids]


async def test_an_answer_that_never_arrived_is_masked_and_counted(plain: ChatTemplate):
    policy = Scripted(plain, ["lost", "heard"])
    session = session_of(policy)
    await session.answer(ModelRequest((user("a"),)))
    await ask(session, user("a"))
    captured = session.close()
    assert [trained(segment) for segment in captured.segments] == [[*policy.made[1].token_ids]]
    assert captured.metrics["masked_answers"] == 1
    assert captured.metrics["masked_tokens"] == len(policy.made[0].token_ids)


async def test_an_answer_that_a_later_call_quotes_did_arrive(plain: ChatTemplate):
    policy = Scripted(plain, ["one", "two"])
    session = session_of(policy)
    (reply,) = await session.answer(ModelRequest((user("a"),)))
    await ask(session, user("a"), reply.message, user("b"))
    assert session.close().metrics["masked_answers"] == 0


async def test_the_conversation_ends_with_the_newest_answer_that_arrived(plain: ChatTemplate):
    """Also if the agent closed the stream once it had the text, and continued it."""
    session = session_of(Scripted(plain, ["one", "two", "three"]))
    (first,) = await session.answer(ModelRequest((user("a"),)))
    assert session.conversation == ()
    history = (user("a"), first.message, user("b"))
    (second,) = await session.answer(ModelRequest(history))
    assert (session.conversation, session.is_chat) == ((user("a"), first.message), True)
    await session.answer(ModelRequest((*history, second.message, user("c"))))
    session.deliver([first])
    assert session.conversation == (*history, second.message)
    assert len(session.close().turns) == 2


async def test_a_template_that_drops_thoughts_gives_a_segment_for_each_answer(forgetful: ChatTemplate):
    policy = Scripted(forgetful, ["<think>hm</think>one", "<think>so</think>two"])
    session = session_of(policy)
    first = await ask(session, user("a"))
    await ask(session, user("a"), first, user("b"))
    captured = session.close()
    assert [trained(segment) for segment in captured.segments] == [[*made.token_ids] for made in policy.made]
    assert "hm" not in "".join(forgetful.token_text(i) for i in policy.sent[1])


async def test_an_answer_that_was_cut_is_ended_before_the_next_message(plain: ChatTemplate):
    policy = Scripted(plain, ["a long answer", "two"])
    session = session_of(policy, max_new_tokens=4)
    (cut,) = await session.answer(ModelRequest((user("a"),)))
    assert cut.finish_reason == "length"
    await ask(session, user("a"), cut.message, user("b"))
    (segment,) = session.close().segments
    end = len(policy.sent[0]) + 4
    assert (segment.tokens[end], bool(segment.loss_mask[end])) == (plain.end_id, False)


@pytest.mark.parametrize("put_back", ["", "Observation:", "Observation: mine"])
async def test_stop_words_cut_what_the_agent_gets_and_what_is_trained(plain: ChatTemplate, put_back: str):
    policy = Scripted(plain, ["think Observation: made up", "two"])
    session = session_of(policy)
    (reply,) = await session.answer(ModelRequest((user("a"),), stop=("Observation:", "never")))
    assert (reply.message.content, reply.stop_word, reply.finish_reason) == ("think ", "Observation:", "stop")
    await ask(session, user("a"), assistant(reply.message.content + put_back), user("b"))
    (segment,) = session.close().segments
    kept = plain.encode("think Observation:")
    assert trained(segment) == [*kept, *policy.made[1].token_ids]


async def test_rewards_belong_to_the_answer_before_them(plain: ChatTemplate):
    policy = Scripted(plain, ["one", "lost", "two"])
    session = session_of(policy)
    session.reward(0.25)
    first = await ask(session, user("a"))
    session.reward(1.0)
    await session.answer(ModelRequest((user("x"),)))
    session.reward(2.0)
    await ask(session, user("a"), first, user("b"))
    session.reward(4.0)
    assert [turn.reward for turn in session.close().turns] == [3.25, 4.0]


async def test_bare_text_and_token_ids_continue_what_was_sampled(plain: ChatTemplate):
    policy = Scripted(plain, ["one", "two", "three"])
    session = session_of(policy)
    session.deliver(await session.answer(ModelRequest(prompt="Q: a\nA:")))
    session.deliver(await session.answer(ModelRequest(prompt=f"Q: a\nA:one{plain.end_text}\nQ: b\nA:")))
    session.deliver(await session.answer(ModelRequest(prompt=(*policy.sent[1], *policy.made[1].token_ids, 5))))
    (segment,) = session.close().segments
    assert segment.tokens.tolist() == [*policy.sent[2], *policy.made[2].token_ids]
    assert int(segment.loss_mask.sum()) == sum(len(made.token_ids) for made in policy.made)


async def test_a_text_does_not_continue_a_prompt_of_token_ids(plain: ChatTemplate):
    policy = Scripted(plain, ["The end", "Berlin"])
    session = session_of(policy, max_new_tokens=3)
    await session.answer(ModelRequest(prompt=(5, 6)))
    await session.answer(ModelRequest(prompt="The capital of Germany is"))
    assert policy.sent == [(5, 6), plain.encode("The capital of Germany is")]


async def test_a_new_text_begins_with_the_tokenizers_own_token():
    """As with vLLM, whose `/v1/completions` adds a BOS that chat templates write themselves."""
    template = chat_template(PLAIN, START)
    policy = Scripted(template, ["one", "two", "three", "four"])
    session = session_of(policy)
    for request in (
        ModelRequest(prompt="a"),
        ModelRequest(prompt=f"aone{END}b"),
        ModelRequest(prompt=f"{START}c"),
        ModelRequest(prompt="d", has_start=False),
    ):
        session.deliver(await session.answer(request))
    start, *_ = template.encode(START)
    first = (start, *template.encode("a"))
    continued = (*first, *policy.made[0].token_ids, *template.encode("b"))
    assert policy.sent == [first, continued, template.encode(f"{START}c"), template.encode("d")]
    assert len(session.close().segments) == 3


async def test_a_call_without_room_is_refused_by_openais_name_for_it(plain: ChatTemplate):
    session = session_of(Scripted(plain, ["one"]), sequence_length=10)
    with pytest.raises(InvalidCallError) as refused:
        await ask(session, user("a long question"))
    assert refused.value.kind == "context_length_exceeded"
    assert session.ran_out
    await session.answer(ModelRequest(prompt="short"))  # as an agent that compacts its history
    assert not session.ran_out


async def test_tools_are_refused_where_the_template_knows_none(plain: ChatTemplate):
    session = session_of(Scripted(plain, ["one"]))
    with pytest.raises(UnusableError, match="writes no tool calls"):
        await ask(session, user("a"), tools=(WEATHER,))


async def test_logprobs_that_do_not_belong_to_their_tokens_fail_the_episode(plain: ChatTemplate):
    policy = Scripted(plain, ["one"])

    async def wrong(prompt: tuple[int, ...], max_tokens: int):
        return replace(await policy(prompt, max_tokens), logprobs=(0.0,))

    session = session_of(policy)
    session.sample = wrong
    with pytest.raises(ValueError, match="logprobs"):
        await ask(session, user("a"))
    assert session.failed.is_set()


# --- whatever an agent does ------------------------------------------------------------------------------------------

Step = st.tuples(
    st.sampled_from(["go on", "branch", "retry", "rewrite", "compact", "lose", "siblings", "text"]), st.integers(0, 99)
)
SHORT = chat_template(PLAIN)


@settings(max_examples=60, deadline=None)
@given(st.lists(Step, min_size=1, max_size=14))
async def test_each_sampled_token_is_trained_at_most_once_in_any_call_order(steps: list[tuple[str, int]]):
    policy = Scripted(SHORT, lambda number: "ab "[: number % 4] + "x" * (number % 3))
    session = session_of(policy)
    histories: list[tuple[ChatMessage, ...]] = [()]
    lost: set[int] = set()
    for act, at in steps:
        messages = histories[at % len(histories) if act in ("branch", "retry") else -1]
        if act == "rewrite":
            messages = tuple(replace(m, content=m.content + "!") if m.role == "assistant" else m for m in messages)
        if act == "compact":
            messages = (user("so far: " + " ".join(m.content for m in messages)),)
        if act == "text":
            session.deliver(await session.answer(ModelRequest(prompt="t" * (1 + at % 3))))
            continue
        messages = (*messages, user(str(at % 3)))
        replies = await session.answer(ModelRequest(messages, num_answers=2 if act == "siblings" else 1))
        if act == "lose":
            lost.add(replies[0].node)
            continue
        session.deliver(replies)
        histories.append((*messages, replies[-1].message))
    captured = session.close()
    decode_trajectory(encode_trajectory(as_trajectory(captured)))

    counts: dict[float, int] = {}
    sequences = {(*prompt, *made.token_ids) for prompt, made in zip(policy.sent, policy.made, strict=True)}
    for segment in captured.segments:
        assert tuple(segment.tokens.tolist()) in sequences, (
            "a segment is what was sent for its last answer, and that answer"
        )
        for logprob in segment.logprobs[segment.loss_mask].tolist():
            counts[logprob] = counts.get(logprob, 0) + 1
    assert all(count == 1 for count in counts.values())
    expected = {
        float(np.float32(logprob))
        for number, made in enumerate(policy.made)
        if number not in lost or session.tree.nodes[number].delivered
        for logprob in made.logprobs
    }
    assert set(counts) == expected
    for turn in captured.turns:
        assert captured.segments[turn.segment].loss_mask[turn.start : turn.end].all()
