"""Rendering of a tag's `agent_template`, shared by demonstrations and rollouts."""

IMAGE = "{image}"
"""Placeholder for the env's image."""


def fill_template(
    template: str, *, observation: str, step: int, actions_left: int, history: str = "", image: str = IMAGE
) -> str:
    """Render the user message of a turn; other braces are kept, and observations are not searched for placeholders.

    step: from 1. actions_left: remaining turns, including this one.
    """
    if template == "{observation}":
        return observation
    filled = template.replace("{step}", str(step)).replace("{actions_left}", str(actions_left)).replace(IMAGE, image)
    parts = filled.split("{observation}")
    return observation.join(part.replace("{history}", history) for part in parts)
