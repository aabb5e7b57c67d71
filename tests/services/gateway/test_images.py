"""Images of agents' calls: read from each API, shown to the policy, kept in the trajectory."""

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from offbeat.services.chat.template import ChatTemplate, load_chat_template
from offbeat.services.chat.vision import ImageProcessor, encode_png
from offbeat.services.gateway import images
from offbeat.services.gateway.app import build
from offbeat.services.gateway.session import EpisodeSession
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import PromptImage, StopReason, Trajectory
from offbeat.services.rollout.agents.episode import runtime_for
from offbeat.services.rollout.config import AgentRunner, CustomEnv
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.families import write_vision_policy
from tests.services.gateway.templates import Scripted, session_of

WORDS = ("look", "what", "here", "and", "Left", "Right", "Up")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def picture(seed: int, side: int = 64) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def part(path: str, image: bytes | str) -> dict[str, Any]:
    """An image, or a URL, in an API's form."""
    url = image if isinstance(image, str) else data_url(image)
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if isinstance(image, str):
        return {"type": "image", "source": {"type": "url", "url": image}}
    data = base64.b64encode(image).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(path: str, words: str) -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": words}


def body(path: str, *messages: dict[str, Any]) -> dict[str, Any]:
    key = "input" if path == RESPONSES else "messages"
    return {key: list(messages), **({"max_tokens": 100} if path == MESSAGES else {})}


def user(path: str, *parts: bytes | str) -> dict[str, Any]:
    content = [part(path, each) if isinstance(each, bytes) else text(path, each) for each in parts]
    return {"role": "user", "content": content}


def answer(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


async def post(session: EpisodeSession, path: str, sent: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(app=build({session.key: session}), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        headers = {"Authorization": f"Bearer {session.key}"}
        return await client.post(path, content=json.dumps(sent), headers=headers)


async def ask(session: EpisodeSession, path: str, *messages: dict[str, Any]) -> dict[str, Any]:
    response = await post(session, path, body(path, *messages))
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(session: EpisodeSession, path: str, *messages: dict[str, Any]) -> str:
    response = await post(session, path, body(path, *messages))
    assert response.status_code == 400, response.text
    assert session.failure is None
    return response.json()["error"]["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=1, vision=TinyVisionConfig(depth=1)), WORDS)
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> ChatTemplate:
    return load_chat_template(folder)


def expected(template: ChatTemplate, *parts: bytes | str) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """A first user's message, by the placeholders of the template."""
    mark = template.image_tokens.mark
    written = "".join(mark if isinstance(each, bytes) else each for each in parts)
    text = f"<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
    return template.image_tokens.place(template.encode(text), [each for each in parts if isinstance(each, bytes)])


@pytest.mark.parametrize("path", APIS)
async def test_an_images_tokens_and_pixels_reach_the_policy(seeing: ChatTemplate, folder: Path, path: str):
    policy = Scripted(seeing, ["Left"])
    session = session_of(policy)
    reply = await ask(session, path, user(path, "look ", picture(1), picture(2, 96), " here", " and"))
    tokens, placed = expected(seeing, "look ", picture(1), picture(2, 96), " here\n and")
    assert (policy.sent, policy.images) == ([tokens], [placed])
    assert [image.count for image in placed] == [4, 9] == [ImageProcessor(folder).count(each.png) for each in placed]
    usage = reply["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(tokens)
    (segment,) = session.close().segments
    assert segment.images == placed
    assert segment.tokens[: len(tokens)].tolist() == list(tokens)
    assert not segment.loss_mask[: len(tokens)].any()


@pytest.mark.parametrize("path", APIS)
async def test_later_calls_continue_the_segment_with_their_images(seeing: ChatTemplate, path: str):
    policy = Scripted(seeing, ["Left", "Right", "Up"])
    session = session_of(policy)
    messages = [user(path, picture(1), "what")]
    for word, more in (("Left", picture(2, 96)), ("Right", "and"), ("Up", "here")):
        await ask(session, path, *messages)
        messages += [answer(word), user(path, more)]
    captured = session.close()
    (segment,) = captured.segments
    assert [[image.png for image in each] for each in policy.images] == [
        [picture(1)],
        [picture(1), picture(2, 96)],
        [picture(1), picture(2, 96)],
    ]
    assert segment.images == policy.images[-1]
    assert segment.tokens.tolist() == [*policy.sent[-1], *policy.made[-1].token_ids]
    pad = seeing.image_tokens.reader.image_token_id
    for image in segment.images:
        assert segment.tokens[image.start : image.start + image.count].tolist() == [pad] * image.count
    assert captured.metrics["unverified_messages"] == 0
    whole = Trajectory("g", 0, 0, "t", 1, captured.segments, captured.turns, StopReason.TERMINATED)
    assert decode_trajectory(encode_trajectory(whole)).segments[0].images == segment.images


@pytest.mark.parametrize("path", APIS)
async def test_another_image_of_equal_size_is_another_sequence(seeing: ChatTemplate, path: str):
    policy = Scripted(seeing, ["Left", "Right", "Up"])
    session = session_of(policy)
    first = user(path, picture(1), "what")
    await ask(session, path, first)
    await ask(session, path, first, answer("Left"), user(path, "and"))
    await ask(session, path, user(path, picture(2), "what"), answer("Left"), user(path, "and"))
    assert policy.sent[1][: len(policy.sent[0])] == policy.sent[2][: len(policy.sent[0])], "tokens alone are equal"
    captured = session.close()
    assert [[image.png for image in each.images] for each in captured.segments] == [[picture(1)], [picture(2)]]
    assert [turn.segment for turn in captured.turns] == [0, 0, 1]
    assert len({turn.state_hash for turn in captured.turns}) == 2, "by the last message"


async def test_calls_that_differ_in_a_later_image_share_the_stem(seeing: ChatTemplate):
    policy = Scripted(seeing, ["Left", "Right", "Up"])
    session = session_of(policy)
    stem = [user(CHAT, picture(1), "what"), answer("Left")]
    await ask(session, CHAT, stem[0])
    for seed in (2, 3):
        await ask(session, CHAT, *stem, user(CHAT, picture(seed)))
    captured = session.close()
    images = [[image.png for image in each.images] for each in captured.segments]
    assert images == [[picture(1), picture(2)], [picture(1), picture(3)]]
    assert [int(each.loss_mask.sum()) for each in captured.segments] == [4, 2], "the stem is trained once"
    assert len({turn.state_hash for turn in captured.turns}) == 3


@pytest.mark.parametrize("path", APIS)
async def test_a_tools_result_shows_images(seeing: ChatTemplate, path: str):
    policy = Scripted(seeing, ["Left"])
    shown = [text(path, "here "), part(path, picture(1))]
    result: list[dict[str, Any]] = [{"type": "function_call_output", "call_id": "c", "output": shown}]
    if path == CHAT:
        result = [{"role": "tool", "tool_call_id": "c", "content": shown}]
    elif path == MESSAGES:
        block = {"type": "tool_result", "tool_use_id": "c", "content": shown}
        result = [{"role": "user", "content": [block, text(path, "and")]}]
    await ask(session_of(policy), path, user(path, "look"), *result)
    assert [image.png for image in policy.images[0]] == [picture(1)]
    written = [seeing.token_text(token) for token in policy.sent[0]]
    assert written[written.index("here") + 1] == "<|vision_start|>"


async def test_an_earlier_responses_images_are_part_of_the_next(seeing: ChatTemplate):
    policy = Scripted(seeing, ["Left", "Right"])
    session = session_of(policy)
    first = await ask(session, RESPONSES, user(RESPONSES, picture(1), "what"))
    later = {"input": "and", "previous_response_id": first["id"]}
    assert (await post(session, RESPONSES, later)).status_code == 200
    assert policy.images[1] == policy.images[0]
    assert len(session.close().segments) == 1


async def test_responses_that_repeat_an_image_keep_it_once(seeing: ChatTemplate):
    out = io.BytesIO()
    Image.open(io.BytesIO(picture(1))).save(out, format="JPEG")
    policy = Scripted(seeing, lambda _: "Left")
    session = session_of(policy)
    for _ in range(3):
        last = await ask(session, RESPONSES, user(RESPONSES, out.getvalue(), "what"))
    kept = [image for messages in session.conversations.values() for message in messages for image in message.images]
    assert len(kept) == 3
    assert all(image is kept[0] for image in kept)
    later = {"input": "and", "previous_response_id": last["id"]}
    assert (await post(session, RESPONSES, later)).status_code == 200
    assert policy.images[3] == policy.images[0]


@pytest.mark.parametrize("kind", FORMATS)
async def test_each_format_is_sent_as_png(seeing: ChatTemplate, kind: str):
    out = io.BytesIO()
    Image.open(io.BytesIO(picture(1))).save(out, format=kind)
    policy = Scripted(seeing, ["Left"])
    await ask(session_of(policy), CHAT, user(CHAT, out.getvalue()))
    ((image,),) = policy.images
    assert (image.png[:4], image.count) == (b"\x89PNG", 4)
    assert (image.png == out.getvalue()) == (kind == "PNG")


async def test_an_image_is_converted_once_for_an_episode(seeing: ChatTemplate, monkeypatch: pytest.MonkeyPatch):
    converted: list[bytes] = []
    convert = images.to_png
    monkeypatch.setattr(images, "to_png", lambda *how: converted.append(how[0]) or convert(*how))
    session = session_of(Scripted(seeing, lambda _: "Left"))
    for _ in range(3):
        await ask(session, CHAT, user(CHAT, picture(1), picture(2)))
    assert converted == [picture(1), picture(2)]


async def test_image_tokens_are_counted_and_limited(seeing: ChatTemplate):
    tokens, _ = expected(seeing, picture(1, 256), "what")
    session = session_of(Scripted(seeing, ["Left"]), sequence_length=len(tokens) + 1)
    counted = await post(session, f"{MESSAGES}/count_tokens", body(MESSAGES, user(MESSAGES, picture(1, 256), "what")))
    assert counted.json() == {"input_tokens": len(tokens)}
    cut = await ask(session, CHAT, user(CHAT, picture(1, 256), "what"))
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 1)
    full = await post(session, CHAT, body(CHAT, user(CHAT, picture(1, 256), "what what")))
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert session.ran_out


async def test_tokens_of_a_conversation_with_images_continue_it(seeing: ChatTemplate):
    policy = Scripted(seeing, ["Left", "Right", "Up", "Up"])
    session = session_of(policy)
    await ask(session, CHAT, user(CHAT, picture(1), "what"))
    prompt = [*policy.sent[0], *policy.made[0].token_ids, *seeing.encode("and")]
    assert (await post(session, "/v1/completions", {"prompt": prompt})).status_code == 200
    assert policy.images[1] == policy.images[0]
    policy.say = lambda _: "Left"
    await ask(session, CHAT, user(CHAT, picture(2), "what"))
    ambiguous = await post(session, "/v1/completions", {"prompt": prompt})
    assert (ambiguous.status_code, "those of several images" in ambiguous.text) == (400, True)


SIDE = 8_000
HEADER = b"IHDR" + struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
BOMB = b"\x89PNG\r\n\x1a\n\0\0\0\r" + HEADER + struct.pack(">II", zlib.crc32(HEADER), 0) + b"IDAT"
HALF_A_CHUNK = struct.pack(">I4s1sI", 1, b"cHRM", b"\0", zlib.crc32(b"cHRM\0"))
MALFORMED = picture(1)[:-12] + HALF_A_CHUNK + picture(1)[-12:]
"""A PNG whose pixels can be read, and not what follows."""
BMP = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, 1, 1, 1, 24, 0, 0, 0, 0, 0, 0) + b"\0" * 4


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (BOMB, "image 1 of the messages, as PNG: an image of 8000 x 8000 pixels, more than 33554432"),
        (picture(1, 640), "image 1 of the messages, as PNG: an image of 12"),
        (picture(1)[:-30], "an image that can't be read: "),
        (MALFORMED, "an image that can't be read: unpack requires a buffer"),
        (BMP, "cannot identify image"),
        (b"", "cannot identify image"),
        ("https://example.org/cat.png", "the URL 'https://example.org/cat.png'; the gateway fetches nothing: send the"),
        ("http://example.org/cat.png", "the gateway fetches nothing"),
        ("file:///etc/passwd", "the gateway fetches nothing"),
        ("data:image/png;base64,A?", "a data URL (data:image/png;base64) can't be read"),
        ("data:image/png,A", "is not in base64"),
    ],
)
async def test_an_image_that_can_not_be_shown_is_refused(
    seeing: ChatTemplate, path: str, image: bytes | str, problem: str
):
    session = session_of(Scripted(seeing, []))
    message = {"role": "user", "content": [part(path, image), text(path, "what")]}
    assert problem in await refusal(session, path, message)
    assert session.tree.nodes == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "an image part has no image"),
        ({"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "A?"}}]}, "can't be read"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "a part of type 'input_audio': texts and images"),
        ({"role": "system", "content": [part(CHAT, picture(1))]}, "images are the user's or a tool's, not of the role"),
        (user(CHAT, picture(1), "\ufdd0"), "has U+FDD0"),
        (user(CHAT, picture(1), " <|image_pad|> "), "can't have the policy's own placeholder"),
        (user(CHAT, *[picture(1)] * 101), "the messages have 101 images; a prompt can have 100"),
    ],
)
async def test_a_content_that_is_not_understood_is_refused(seeing: ChatTemplate, message: dict[str, Any], problem: str):
    assert problem in await refusal(session_of(Scripted(seeing, [])), CHAT, message)


async def test_conversations_with_too_many_bytes_of_images_are_refused(
    seeing: ChatTemplate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(images, "MAX_EPISODE_BYTES", 3 * len(picture(1)))
    session = session_of(Scripted(seeing, lambda _: "Left"))
    messages = [user(CHAT, picture(1)), answer("Left")]
    await ask(session, CHAT, messages[0])
    await ask(session, CHAT, *messages, user(CHAT, picture(2)))
    assert "continue a conversation" in await refusal(session, CHAT, user(CHAT, picture(3), picture(4)))
    await ask(session, CHAT, *messages, user(CHAT, picture(2)), answer("Left"), user(CHAT, picture(3)))


@pytest.mark.parametrize("path", APIS)
async def test_a_text_policy_refuses_images_and_says_what_to_set(plain: ChatTemplate, path: str):
    session = session_of(Scripted(plain, ["yes"]))
    assert "set tiny.vision to {}, or pretrain to a folder of qwen2_vl, qwen2_5_vl" in await refusal(
        session, path, user(path, picture(1), "what")
    )
    await ask(session, path, user(path, "what"))


async def test_images_need_a_policy_that_is_asked_to_read_them(tmp_path: Path):
    """Qwen3-VL's folder has image processing, and is trained on text all the same."""
    write_vision_policy(tmp_path, "qwen3_vl", WORDS)
    runner = AgentRunner(path="tests.played_agents:shows_images")
    envs = {"See": CustomEnv(env_type="frozen_lake", max_steps=1, max_tokens_per_step=1, agent_runner=runner)}
    for asked in (None, True):
        runtime = runtime_for(envs, tmp_path, image_input=asked)
        assert runtime is not None
        session = session_of(Scripted(runtime.templates[None], ["Left"]))
        message = user(CHAT, picture(1), "what")
        if asked:
            assert (await ask(session, CHAT, message))["usage"]["prompt_tokens"] > 4
        else:
            assert "model_args.image_input to true" in await refusal(session, CHAT, message)
        await runtime.close()
