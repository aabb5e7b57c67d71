"""Filling a tag's `agent_template`; demonstrations and rollouts share it, so that both show the policy the same words."""


def fill_template(template: str, *, observation: str, step: int, actions_left: int) -> str:
    """The user message of a turn; other braces in the template stay as they are, and the observation is never searched.

    step: 1 at the first turn. actions_left: turns that remain, this one included.
    """
    if template == "{observation}":
        return observation
    filled = template.replace("{step}", str(step)).replace("{actions_left}", str(actions_left))
    return filled.replace("{observation}", observation)
