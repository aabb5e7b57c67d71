"""Demonstrator of a run."""

from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.rollout.config import CustomEnv
from offbeat.trainer.config.warm_start import WarmStartConfig
from offbeat.trainer.warm_start.demonstrations import Demonstrate, load_demos, make_text_demonstrator
from offbeat.trainer.warm_start.vision_demonstrations import make_vision_demonstrator


def make_demonstrator(config: WarmStartConfig, env: CustomEnv, chat: ChatFormat, *, max_tokens: int) -> Demonstrate:
    """Build a tag's demonstrator, truncating longer text.

    Raises:
        ValueError: the function or env does not exist, or the policy lacks image input.
    """
    make = make_vision_demonstrator if env.shows_images else make_text_demonstrator
    return make(load_demos(config), env, chat, max_tokens=max_tokens)
