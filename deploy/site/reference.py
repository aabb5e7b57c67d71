"""Reference pages generated from code."""

from offbeat.deploy.site.cli_page import cli_page
from offbeat.deploy.site.config_page import config_page
from offbeat.deploy.site.python_page import python_page
from offbeat.deploy.site.rest_page import rest_page


def generate_pages() -> dict[str, str]:
    """Return the text of each generated page by name."""
    return {
        "reference/config.md": config_page(),
        "reference/cli.md": cli_page(),
        "reference/rest.md": rest_page(),
        "reference/python.md": python_page(),
    }
