"""Filling a tag's `agent_template`; demonstrations and rollouts share it, so that both show the policy the same words."""


IMAGE = "{image}"
"""Where a template has this, the turn shows the env's picture."""


def fill_template(template: str, *, observation: str, step: int, actions_left: int, image: str = IMAGE) -> str:
    """The user message of a turn; other braces in the template stay as they are, and the observation is never searched.

    step: 1 at the first turn. actions_left: turns that remain, this one included. image: stands for the picture.
    """
    if template == "{observation}":
        return observation
    filled = template.replace("{step}", str(step)).replace("{actions_left}", str(actions_left)).replace(IMAGE, image)
    return filled.replace("{observation}", observation)
