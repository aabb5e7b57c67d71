"""Paths of the repository that tests use."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "deploy" / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
