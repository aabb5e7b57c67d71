"""The real clients of both makers, over a real server, with a policy that follows a script."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest

from offbeat.services.chat.template import ChatTemplate
from offbeat.services.gateway import app
from offbeat.services.gateway.server import KEEP_ALIVE_S, Gateway
from offbeat.services.gateway.session import EpisodeSession
from offbeat.services.messages.types import Completion
from tests.services.gateway.templates import PLAIN, Scripted, chat_template, session_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@contextlib.asynccontextmanager
async def served(session: EpisodeSession) -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    gateway = Gateway()
    gateway.start()
    try:
        with gateway.open_session(session):
            async with (
                openai.AsyncOpenAI(base_url=f"{gateway.origin}/v1", api_key=session.key) as one,
                anthropic.AsyncAnthropic(base_url=gateway.origin, api_key=session.key) as other,
            ):
                yield one, other
    finally:
        await gateway.close()


def in_one_sequence(policy: Scripted, session: EpisodeSession) -> None:
    """Everything that was said is one segment, trained as it was sampled."""
    captured = session.close()
    (segment,) = captured.segments
    assert segment.tokens.tolist() == [*policy.sent[-1], *policy.made[-1].token_ids]
    assert segment.tokens[segment.loss_mask].tolist() == [t for made in policy.made for t in made.token_ids]
    assert captured.metrics["unverified_messages"] == captured.metrics["masked_answers"] == 0


async def test_chat_completions_with_tools_are_one_sequence(hermes: ChatTemplate):
    policy = Scripted(hermes, ["Let me see. " + CALL, "Rain.", "Welcome."])
    session = session_of(policy)
    async with served(session) as (client, _):
        messages: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ulm?"}]
        how = {"model": "any", "tools": [FUNCTION], "logprobs": True}
        first = await client.chat.completions.create(messages=messages, **how, extra_body={"return_token_ids": True})
        choice = first.choices[0]
        assert tuple(first.model_extra["prompt_token_ids"]) == policy.sent[0]
        assert tuple(choice.model_extra["token_ids"]) == policy.made[0].token_ids
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Ulm"}
        assert [entry.logprob for entry in choice.logprobs.content] == list(policy.made[0].logprobs)
        assert first.usage.completion_tokens == len(policy.made[0].token_ids)
        messages += [choice.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        second = await client.chat.completions.create(messages=messages, **how)
        assert second.choices[0].message.content == "Rain."
        assert "token_ids" not in second.choices[0].model_extra
        messages += [second.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Thanks."}]
        await client.chat.completions.create(messages=messages, **how)
    in_one_sequence(policy, session)


async def test_a_stream_has_the_same_content_in_pieces(hermes: ChatTemplate):
    policy = Scripted(hermes, ["Well. " + CALL, "Rain."])
    session = session_of(policy)
    async with served(session) as (client, _):
        how = {"model": "any", "tools": [FUNCTION], "stream": True, "stream_options": {"include_usage": True}}
        messages: list = [{"role": "user", "content": "Ulm?"}]
        chunks = [chunk async for chunk in await client.chat.completions.create(messages=messages, **how)]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        words = "".join(delta.content or "" for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert (words, call.function.name, chunks[-2].choices[0].finish_reason) == ("Well.", "weather", "tool_calls")
        assert chunks[-1].usage.completion_tokens == len(policy.made[0].token_ids)
        function = {"name": "weather", "arguments": call.function.arguments}
        messages += [
            {
                "role": "assistant",
                "content": words,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        assert [chunk async for chunk in await client.chat.completions.create(messages=messages, **how)]
    in_one_sequence(policy, session)


@pytest.mark.parametrize("said", ["Well. " + CALL, CALL, ""])
async def test_a_stream_has_the_logprobs_of_all_tokens(hermes: ChatTemplate, said: str):
    policy = Scripted(hermes, [said])
    async with served(session_of(policy)) as (client, _):
        how = {"model": "any", "tools": [FUNCTION], "stream": True, "logprobs": True}
        stream = await client.chat.completions.create(messages=[{"role": "user", "content": "Ulm?"}], **how)
        values = [chunk.choices[0].logprobs async for chunk in stream]
    assert [entry.logprob for value in values if value for entry in value.content] == list(policy.made[0].logprobs)


@pytest.mark.parametrize("carried", [True, False], ids=["previous_response_id", "whole input"])
async def test_responses_are_one_sequence(hermes: ChatTemplate, carried: bool):
    policy = Scripted(hermes, ["Well. " + CALL, "Rain."])
    session = session_of(policy)
    async with served(session) as (client, _):
        how = {"model": "any", "instructions": "Be brief.", "tools": [{"name": "weather", "parameters": WEATHER}]}
        how["tools"][0]["type"] = "function"
        first = await client.responses.create(input="Ulm?", **how)
        assert first.output_text == "Well."
        call = first.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        if carried:
            second = await client.responses.create(input=[result], previous_response_id=first.id, **how)
        else:
            messages = [{"role": "user", "content": "Ulm?"}, *(item.model_dump() for item in first.output), result]
            second = await client.responses.create(input=messages, **how)
        assert (second.output_text, second.status) == ("Rain.", "completed")
    in_one_sequence(policy, session)


async def test_a_stream_of_a_response_ends_with_the_complete_response(hermes: ChatTemplate):
    session = session_of(Scripted(hermes, ["Well. " + CALL]))
    async with served(session) as (client, _):
        tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
        async with client.responses.stream(model="any", input="Ulm?", tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    assert (final.output_text, final.output[1].name) == ("Well.", "weather")
    assert session.close().metrics["masked_answers"] == 0


async def test_completions_continue_their_own_text(plain: ChatTemplate):
    policy = Scripted(plain, ["one", "two", "three"])
    session = session_of(policy)
    async with served(session) as (client, _):
        first = await client.completions.create(model="any", prompt="Q:", max_tokens=3, logprobs=0)
        assert (first.choices[0].text, first.choices[0].finish_reason) == ("one", "length")
        assert first.choices[0].logprobs.token_logprobs == list(policy.made[0].logprobs)
        stream = await client.completions.create(model="any", prompt="Q:one\nQ:", max_tokens=3, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == "two"
        ids = [*policy.sent[1], *policy.made[1].token_ids, 7]
        await client.completions.create(model="any", prompt=ids)
    in_one_sequence(policy, session)


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropics_messages_with_tools_are_one_sequence(hermes: ChatTemplate, streamed: bool):
    policy = Scripted(hermes, ["Well. " + CALL, "Rain."])
    session = session_of(policy)
    async with served(session) as (_, client):
        tools = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]
        how = {"model": "any", "max_tokens": 500, "system": "Be brief.", "tools": tools}

        async def create(messages: list) -> anthropic.types.Message:
            if not streamed:
                return await client.messages.create(messages=messages, **how)
            async with client.messages.stream(messages=messages, **how) as stream:
                return await stream.get_final_message()

        messages: list = [{"role": "user", "content": "Ulm?"}]
        first = await create(messages)
        assert [block.type for block in first.content] == ["text", "tool_use"]
        assert (first.stop_reason, first.content[1].input) == ("tool_use", {"city": "Ulm"})
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "rain"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await create(messages)
        assert (second.content[0].text, second.stop_reason) == ("Rain.", "end_turn")
        assert second.usage.output_tokens == len(policy.made[1].token_ids)
    in_one_sequence(policy, session)


async def test_anthropics_count_of_tokens_is_that_of_the_next_call(hermes: ChatTemplate):
    session = session_of(Scripted(hermes, ["one"]), max_calls=1)
    async with served(session) as (_, client):
        tools = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]
        how: dict = {"model": "any", "messages": [{"role": "user", "content": "a"}], "system": "b", "tools": tools}
        counts = [(await client.messages.count_tokens(**how)).input_tokens for _ in range(2)]
        answer = await client.messages.create(**how, max_tokens=5)
        with pytest.raises(anthropic.BadRequestError, match="role 'robot'"):
            await client.messages.count_tokens(**{**how, "messages": [{"role": "robot", "content": "a"}]})
        captured = session.close()
        with pytest.raises(anthropic.BadRequestError, match="episode of this key is over"):
            await client.messages.count_tokens(**how)
    assert counts == [answer.usage.input_tokens] * 2
    assert captured.metrics["agent_calls"] == 1


async def test_anthropics_final_assistant_message_is_continued(plain: ChatTemplate):
    """A prefill is context; an answer that was cut is continued by what was sampled."""
    policy = Scripted(plain, ["2, 3", ", 4", "Welcome."])
    session = session_of(policy)
    async with served(session) as (_, client):
        messages: list = [{"role": "user", "content": "Count."}]

        async def create(max_tokens: int, *last: str) -> str:
            texts = [{"role": "assistant", "content": text} for text in last]
            answer = await client.messages.create(model="any", max_tokens=max_tokens, messages=[*messages, *texts])
            return answer.content[0].text

        assert await create(4, "1, ") == "2, 3"
        assert await create(50, "1, 2, 3") == ", 4"
        assert plain.text_of(policy.sent[1]).endswith("assistant\n1, 2, 3")
        messages += [{"role": "assistant", "content": "1, 2, 3, 4"}, {"role": "user", "content": "Thanks."}]
        assert await create(50) == "Welcome."
    captured = session.close()
    (segment,) = captured.segments
    assert segment.tokens.tolist() == [*policy.sent[-1], *policy.made[-1].token_ids]
    assert segment.tokens[segment.loss_mask].tolist() == [t for made in policy.made for t in made.token_ids]
    assert captured.metrics["unverified_messages"] == 1


async def test_an_answer_that_can_t_be_continued_is_refused(hermes: ChatTemplate):
    thinks = chat_template(PLAIN.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    for template, content, message in ((thinks, "1,", "other text before"), (hermes, [use], "results are missing")):
        async with served(session_of(Scripted(template, ["2"]))) as (_, client):
            messages: list = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
            with pytest.raises(anthropic.BadRequestError, match=message):
                await client.messages.create(model="any", max_tokens=5, messages=messages)


async def test_anthropics_stop_sequences_are_named(plain: ChatTemplate):
    policy = Scripted(plain, ["one STOP two"])
    async with served(session_of(policy)) as (_, client):
        messages = [{"role": "user", "content": "a"}]
        answer = await client.messages.create(
            model="any", max_tokens=50, messages=messages, stop_sequences=["STOP", ""]
        )
    assert policy.stops == [("STOP",)], "the engine ends there, too"
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one ", "stop_sequence", "STOP")


async def test_several_answers_to_one_call_are_branches(plain: ChatTemplate):
    session = session_of(Scripted(plain, ["one", "two"]))
    async with served(session) as (client, _):
        messages = [{"role": "user", "content": "a"}]
        answer = await client.chat.completions.create(model="any", messages=messages, n=2, temperature=0.3)
    assert [choice.message.content for choice in answer.choices] == ["one", "two"]
    captured = session.close()
    assert len(captured.segments) == 2
    assert captured.metrics["ignored_parameters"] == 1


async def test_alternatives_and_single_calls_are_ignored_and_counted(hermes: ChatTemplate):
    session = session_of(Scripted(hermes, ["one"] * 4))
    async with served(session) as (client, other):
        how: dict = {"model": "any", "messages": [{"role": "user", "content": "a"}]}
        await client.chat.completions.create(**how, logprobs=True, top_logprobs=2)
        await client.chat.completions.create(**how, tools=[FUNCTION], parallel_tool_calls=False)
        await client.completions.create(model="any", prompt="a", logprobs=2)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        await other.messages.create(**how, max_tokens=5, tool_choice=choice)
    assert session.close().metrics["ignored_parameters"] == 4


async def test_the_policy_is_listed(plain: ChatTemplate):
    async with served(session_of(Scripted(plain, []))) as (one, other):
        assert [model.id async for model in one.models.list()] == ["policy"]
        assert [model.id async for model in other.models.list()] == ["policy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\]: role 'robot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "the gateway fetches nothing",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"n": 1000}, "n is 1000"),
        ({"logit_bias": {"5": 100}}, "logit_bias can't be followed"),
        ({"tools": [FUNCTION]}, "writes no tool calls"),
    ],
)
async def test_an_invalid_request_is_refused_with_its_error(plain: ChatTemplate, changes: dict, message: str):
    async with served(session_of(Scripted(plain, ["one"]))) as (client, _):
        call = {"model": "any", "messages": [{"role": "user", "content": "a"}], **changes}
        with pytest.raises(openai.BadRequestError, match=message):
            await client.chat.completions.create(**call)


async def test_a_full_context_is_reported_as_by_openai(plain: ChatTemplate):
    async with served(session_of(Scripted(plain, ["one"]), sequence_length=12)) as (client, other):
        messages = [{"role": "user", "content": "a long question"}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="any", messages=messages)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError):
            await other.messages.create(model="any", messages=messages, max_tokens=5)


async def test_a_key_opens_its_own_episode_and_none_when_it_is_over(plain: ChatTemplate):
    session = session_of(Scripted(plain, ["one"]))
    messages = [{"role": "user", "content": "a"}]
    async with served(session) as (client, _):
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").chat.completions.create(model="any", messages=messages)
        session.close()
        with pytest.raises(openai.BadRequestError, match="over"):
            await client.chat.completions.create(model="any", messages=messages)


async def test_a_client_that_disconnects_cancels_its_sampling(plain: ChatTemplate):
    policy = Scripted(plain, ["late", "in time"])
    waiting, cancelled = asyncio.Event(), asyncio.Event()

    async def slow_at_first(prompt: tuple[int, ...], max_new_tokens: int) -> Completion:
        if not waiting.is_set():
            waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return await policy(prompt, max_new_tokens)

    session = session_of(policy)
    session.sample = slow_at_first
    async with served(session) as (client, _):
        messages = [{"role": "user", "content": "a"}]
        call = asyncio.create_task(client.chat.completions.create(model="any", messages=messages))
        await waiting.wait()
        call.cancel()
        await wait_until(cancelled.is_set)
        await client.chat.completions.create(model="any", messages=messages)
    in_one_sequence(policy, session)


async def test_a_failing_policy_is_not_sampled_again(plain: ChatTemplate):
    num_calls = 0

    async def broken(_: tuple[int, ...], __: int) -> Completion:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("no replica")

    session = session_of(Scripted(plain, []))
    session.sample = broken
    async with served(session) as (client, _):
        with pytest.raises(openai.InternalServerError, match="no replica"):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}])
    assert num_calls == 1
    assert session.failed.is_set()


async def test_a_body_that_is_no_json_is_refused(plain: ChatTemplate):
    session = session_of(Scripted(plain, []))
    async with served(session) as (client, _), httpx.AsyncClient() as http:
        headers = {"Authorization": f"Bearer {session.key}"}
        for body in (b"{", b"[]", b"\xff"):
            answer = await http.post(f"{client.base_url}chat/completions", content=body, headers=headers)
            assert (answer.status_code, "body" in answer.json()["error"]["message"]) == (400, True)


async def test_no_client_keeps_a_connection_for_as_long_as_the_server(plain: ChatTemplate):
    async with served(session_of(Scripted(plain, []))) as clients, httpx.AsyncClient() as http:
        for pool in (*(client._client for client in clients), http):
            keep_alive_s = pool._transport._pool._keepalive_expiry  # type: ignore[attr-defined]  # no client says it in public
            assert keep_alive_s < KEEP_ALIVE_S, "the server may close what the client is about to send on"


async def test_a_body_that_is_too_large_is_refused(plain: ChatTemplate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1 << 20)
    session = session_of(Scripted(plain, []))
    async with served(session) as (client, _), httpx.AsyncClient() as http:
        headers = {"Authorization": f"Bearer {session.key}"}
        answer = await http.post(f"{client.base_url}chat/completions", content=b" " * (1 << 22), headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body has more than 1 MiB")
