"""Manifests of the Helm chart, as helm renders them; as a program, writes those of deploy/kubernetes."""

from typing import Any

import yaml
from helm_python.chart import Chart

from tests.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
FILES = {
    "base.yaml": ("storage", "redis", "networkpolicy"),
    "rayservice.yaml": ("rayservice",),
    "rayjob.yaml": ("rayjob",),
}
"""Manifest -> templates."""
HEADER = "# Rendered from deploy/kubernetes/chart with its own values (`make docs`); change those.\n"


def render(values: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the text of each template, by its name."""
    rendered = Chart.load(CHART).render(values or {}, name="offbeat", namespace="offbeat")
    return {path.rpartition("/")[2].removesuffix(".yaml"): text for path, text in rendered.items()}


def documents(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [each for text in render(values).values() for each in yaml.safe_load_all(text) if each]


def manifest(name: str) -> str:
    """Return what deploy/kubernetes/NAME should hold."""
    texts = render({"job": {"enabled": name == "rayjob.yaml"}})
    return HEADER + "---\n".join(texts[template].strip() + "\n" for template in FILES[name])


if __name__ == "__main__":
    for file in FILES:
        (KUBERNETES / file).write_text(manifest(file))
