"""Packaged configurations are listed, and each is complete."""

import yaml

from offbeat.deploy.config.loader import CONFIGS, packaged_configs, read_document
from tests.services.control.api_harness import ApiHarness, code


async def test_every_recipe_is_a_whole_configuration(api: ApiHarness) -> None:
    listed = (await api.http.get("/recipes")).json()["recipes"]
    assert {each["name"]: each["about"] for each in listed} == packaged_configs()
    answer = await api.http.get("/recipes/recipes/dapo")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/yaml")
    tree = yaml.safe_load(answer.text)
    assert (tree["exp_name"], tree["loss_agg_mode"], tree["pretrain"]) == ("dapo", "token-mean", "tiny")
    assert read_document(answer.text).exp_name == "dapo"


async def test_no_other_file_is_given_out(api: ApiHarness) -> None:
    for name in ("nothing", "../deploy.yaml", "%2e%2e/deploy", str(CONFIGS / "quickstart.yaml")):
        answer = await api.http.get(f"/recipes/{name}")
        assert answer.status_code == 404, name
    assert code(await api.http.get("/recipes/nothing")) == "unknown_recipe"
