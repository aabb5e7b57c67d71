"""Filling a tag's `agent_template`; demonstrations and rollouts share it, so that both show the policy the same words."""

IMAGE = "{image}"
"""Where a template has this, the turn shows the env's picture."""


def fill_template(
    template: str, *, observation: str, step: int, actions_left: int, history: str = "", image: str = IMAGE
) -> str:
    """The user message of a turn; other braces in the template stay as they are, and observations are never searched.

    step: 1 at the first turn. actions_left: turns that remain, this one included. history: earlier turns. image: stands for
    the picture.
    """
    if template == "{observation}":
        return observation
    filled = template.replace("{step}", str(step)).replace("{actions_left}", str(actions_left)).replace(IMAGE, image)
    parts = filled.split("{observation}")
    return observation.join(part.replace("{history}", history) for part in parts)
