"""Filling a tag's `agent_template`; demonstrations and rollouts share it, so that both show the policy the same words."""

IMAGE = "{image}"
"""Placeholder for the env's picture."""


def fill_template(
    template: str, *, observation: str, step: int, actions_left: int, history: str = "", image: str = IMAGE
) -> str:
    """Render the user message of a turn; other braces in the template stay, and observations are not searched.

    step: 1 at the first turn. actions_left: remaining turns, this one included. history: earlier turns. image: text in
    place of the picture.
    """
    if template == "{observation}":
        return observation
    filled = template.replace("{step}", str(step)).replace("{actions_left}", str(actions_left)).replace(IMAGE, image)
    parts = filled.split("{observation}")
    return observation.join(part.replace("{history}", history) for part in parts)
