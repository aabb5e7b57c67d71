"""Views of trajectories with images."""

import base64
from pathlib import Path

import numpy as np
import pytest

from offbeat.deploy.console.trajectories import RecordedTrajectories
from offbeat.services.chat.messages import ChatMessage
from offbeat.services.chat.template import load_chat_template
from offbeat.services.chat.vision import encode_png
from offbeat.services.gateway.session import ModelRequest
from offbeat.services.messages.types import StopReason, Trajectory
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.services.gateway.templates import Scripted, session_of

SHOWN = "<|vision_start|> <|image_pad|> <|vision_end|>"


@pytest.mark.parametrize("text", [(), ("Go", "", "Left")])
async def test_an_agents_images_are_shown_as_those_of_envs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: tuple[str, ...]
) -> None:
    """text: of the env's steps, whose number is not that of the policy's turns."""
    write_tiny_policy(tmp_path, TinyPolicyConfig(vision=TinyVisionConfig()), ("look", "Left", "Right"))
    pngs = [encode_png(np.full((64, 64 * n, 3), 30, dtype=np.uint8)) for n in (1, 2)]
    session = session_of(Scripted(load_chat_template(tmp_path), ["Left", "Right"]))
    messages = [ChatMessage("user", "look \ufdd0", images=(pngs[0],))]
    replies = await session.answer(ModelRequest(tuple(messages)))
    messages += [replies[0].message, ChatMessage("user", "\ufdd0 look", images=(pngs[1],))]
    session.deliver(await session.answer(ModelRequest(tuple(messages))))
    captured = session.close()
    played = Trajectory("g", 0, 0, "t", 1, captured.segments, captured.turns, StopReason.TERMINATED, text=text)
    recorded = RecordedTrajectories(tmp_path, lambda: tmp_path)
    monkeypatch.setattr(recorded, "_read", lambda *_: [played])
    monkeypatch.setattr(recorded, "_of_step", lambda _: [])
    view = recorded.view(0, 0, 0)
    (segment,) = view.segments
    assert [base64.b64decode(image.png) for image in segment.images] == pngs
    assert [image.count for image in segment.images] == [4, 8]
    first = view.turns[0].observation if text else view.text[0]
    assert first == f"<|im_start|> user look {SHOWN} <|im_end|> <|im_start|> assistant"
    assert view.turns[1].observation == f"<|im_start|> user {SHOWN} look <|im_end|> <|im_start|> assistant"
