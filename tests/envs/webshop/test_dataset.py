import json
from pathlib import Path

import pytest

from offbeat.envs.webshop import WebShopConfig, WebShopEnv
from offbeat.envs.webshop.dataset import load_catalogue


def item(number: int, **changes: object) -> dict[str, object]:
    return {
        "asin": f"B00000000{number}",
        "name": f"Acme lamp {number}",
        "query": "Desk Lamps ",
        "product_category": "Home › Lamps",
        "category": "home",
        "pricing": "$10.00",
        "small_description": ["bright", "small"],
        "full_description": "A lamp.",
        "customization_options": {"Color": [{"value": "Red/Blue", "image": None}, {"value": "green"}], "Size": None},
        "images": [""],
        **changes,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    items = [item(1), item(2, pricing="$5.00 to $1,000.50"), item(1), item(3, pricing=None), item(4, asin="nan")]
    row = {"instruction": "i want a lamp.", "instruction_attributes": ["bright"], "instruction_options": ["green"]}
    files = {
        "items_shuffle.json": items,
        "items_ins_v2.json": {
            "B000000001": {"attributes": ["bright"], "instruction": "a lamp", "instruction_attributes": ["bright"]},
        },
        "items_human_ins.json": {"B000000001": [row, {**row, "instruction_attributes": []}], "B000000003": [row]},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_products_and_goals_are_read_as_the_original_reads_them(folder: Path):
    shop = load_catalogue(folder, None, human_goals=True)
    assert [product.asin[-1] for product in shop.products] == ["1", "2", "3"]
    first, second, third = shop.products
    assert (first.query, first.price_tag, first.options) == ("desk lamps", "$10.0", {"color": ("red | blue", "green")})
    assert (first.attributes, second.attributes, third.price) == (("bright",), ("DUMMY_ATTR",), 100.0)
    assert second.price_tag == "$5.0 to $1000.5"
    assert 5 <= second.price <= 1000.5
    assert sorted(goal.product.asin[-1] for goal in shop.goals) == ["1", "3"]
    for goal in shop.goals:
        assert goal.price_upper > goal.product.price
        assert goal.instruction == f"i want a lamp, and price lower than {goal.price_upper:.2f} dollars"


def test_synthetic_goals_ask_for_every_combination_of_options(folder: Path):
    goals = load_catalogue(folder, None, human_goals=False).goals
    assert {goal.options for goal in goals} == {("red | blue",), ("green",)}
    assert all(goal.instruction.startswith("a lamp with color: ") for goal in goals)


def test_the_same_files_make_the_same_shop(folder: Path):
    assert load_catalogue(folder, None, human_goals=True) == load_catalogue(folder, None, human_goals=True)
    assert len(load_catalogue(folder, 1, human_goals=True).products) == 1


def test_an_episode_in_the_shop_of_files(folder: Path):
    env = WebShopEnv(WebShopConfig(data_dir=folder, split="any"))
    env.reset(seed=0)
    env.step("search[bright lamp]")
    env.step(f"click[{env.goal.product.asin}]")
    env.step("click[green]")
    assert env.step("click[buy now]")[1] == 1.0


def test_a_file_that_is_not_webshops_is_named(folder: Path):
    (folder / "items_ins_v2.json").write_text("[oops")
    with pytest.raises(ValueError, match=r"items_ins_v2.json is not JSON"):
        load_catalogue(folder, None, human_goals=True)
    (folder / "items_ins_v2.json").write_text("{}")
    (folder / "items_shuffle.json").write_text('[{"asin": "B1"}]')
    with pytest.raises(ValueError, match="does not hold WebShop's data: KeyError: 'small_description'"):
        load_catalogue(folder, None, human_goals=True)
