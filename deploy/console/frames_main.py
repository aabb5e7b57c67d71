"""Process that replays one episode."""

import io

from PIL import Image

from offbeat.services.chat.vision import encode_png
from offbeat.services.rollout.child_main import serve
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.episodes.state_hash import hash_state
from offbeat.trainer.rendering.episodes import Frame, make_rendered, render_frame


def render(env_text: str, seed: int, answers: list[str], digests: list[str]) -> tuple[list[bytes], int | None]:
    """Return the frames, if any, and the first turn whose observation differs."""
    custom = CustomEnv.model_validate_json(env_text)
    env = make_rendered(custom.env_type, dict(custom.env_config))
    try:
        observation, _ = env.reset(seed=seed)
        frames = [render_frame(env)]
        for turn, (answer, digest) in enumerate(zip(answers, digests, strict=True)):
            shown = frames[-1] if custom.shows_images else None
            if hash_state(str(observation), b"" if shown is None else encode_png(shown)) != digest:
                return [], turn
            observation, *_ = env.step(answer)
            frames.append(render_frame(env))
    finally:
        env.close()
    drawn = [frame for frame in frames if frame is not None]
    return ([_encode(frame) for frame in drawn] if len(drawn) == len(frames) else []), None


def _encode(frame: Frame) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    serve({"render": render})
