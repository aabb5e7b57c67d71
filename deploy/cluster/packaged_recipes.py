"""`deploy/configs` for the control service."""

from collections.abc import Mapping
from pathlib import Path

from offbeat.deploy.config.loader import compose_tree, packaged_configs
from offbeat.deploy.config.yaml_limits import write_yaml


class PackagedRecipes:
    def recipes(self) -> Mapping[str, str]:
        return packaged_configs()

    def recipe(self, name: str) -> str:
        return write_yaml(compose_tree(Path(name)))
