"""`deploy/configs` for the control service."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from offbeat.deploy.config.loader import compose_tree, packaged_configs


class PackagedRecipes:
    def recipes(self) -> Mapping[str, str]:
        return packaged_configs()

    def recipe(self, name: str) -> str:
        return yaml.safe_dump(compose_tree(Path(name)), sort_keys=False, allow_unicode=True)
