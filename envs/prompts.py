"""Rendering of `agent_template`."""

IMAGE = "{image}"
"""Placeholder for the env's image."""
ROW_IMAGE = "\ufdd0"
"""Placeholder of an image in the text of a dataset's row: a Unicode noncharacter, which no text may contain."""


def fill_template(
    template: str, *, observation: str, step: int, actions_left: int, history: str = "", image: str = IMAGE
) -> str:
    """Render a turn's user message; observations and other braces are kept.

    step: from 1. actions_left: including this turn.
    """
    if template == "{observation}":
        return observation
    filled = template.replace("{step}", str(step)).replace("{actions_left}", str(actions_left)).replace(IMAGE, image)
    parts = filled.split("{observation}")
    return observation.join(part.replace("{history}", history) for part in parts)
