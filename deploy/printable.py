"""Texts of policies, envs and services on a terminal, which would obey their escape sequences."""

import re

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_controls(text: str) -> str:
    r"""Replace control characters but tabs and ends of lines by their codes, such as `\x1b`."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
