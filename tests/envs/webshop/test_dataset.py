import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from offbeat.envs.webshop import WebShopConfig, WebShopEnv
from offbeat.envs.webshop.catalogue import Catalogue
from offbeat.envs.webshop.dataset import load_catalogue
from offbeat.envs.webshop.files import ShopFiles
from tests.webshop_files import make_goal, make_item, write_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    items = [
        make_item(1),
        make_item(2, pricing="$5.00 to $1,000.50"),
        make_item(1, name="again"),
        make_item(3, pricing=None, small_description="one line", full_description=None, customization_options=""),
        make_item(4, asin="nan"),
    ]
    first = {"attributes": ["bright"], "instruction": "a lamp", "instruction_attributes": ["bright"]}
    attributes = {"B000000001": first, "B000000009": {"attributes": 3}}
    goals = {
        "B000000001": [make_goal(), make_goal(instruction_attributes=[])],
        "B000000003": [make_goal(instruction_options=[])],
        "B000000009": "of no product that is read",
    }
    return write_files(tmp_path, items, attributes, goals)


def load(folder: Path, num_products: int | None = None, *, human_goals: bool = True) -> Catalogue:
    return load_catalogue(ShopFiles(folder), num_products, human_goals=human_goals)


def test_products_and_goals_are_read_as_the_original_reads_them(folder: Path):
    shop = load(folder)
    assert [(product.asin[-1], product.title[-1]) for product in shop.products] == [("1", "1"), ("2", "2"), ("3", "3")]
    first, second, third = shop.products
    assert (first.query, first.price_tag, first.options) == ("desk lamps", "$10.0", {"color": ("red | blue", "green")})
    assert (first.attributes, second.attributes, third.price) == (("bright",), ("DUMMY_ATTR",), 100.0)
    assert (third.bullet_points, third.description, third.options) == (("one line",), "", {})
    assert second.price_tag == "$5.0 to $1000.5"
    assert 5 <= second.price <= 1000.5
    assert sorted((goal.product.asin[-1], goal.options) for goal in shop.goals) == [("1", ("green",)), ("3", ())]
    for goal in shop.goals:
        assert goal.price_upper > goal.product.price
        assert goal.instruction == f"i want a lamp, and price lower than {goal.price_upper:.2f} dollars"


def test_synthetic_goals_ask_for_every_combination_of_options(folder: Path):
    goals = load(folder, human_goals=False).goals
    assert {goal.options for goal in goals} == {("red | blue",), ("green",)}
    assert all(goal.instruction.startswith("a lamp with color: ") for goal in goals)


def test_the_same_files_make_the_same_shop(folder: Path):
    assert load(folder) == load(folder)
    assert len(load(folder, 1).products) == 1


def test_files_of_the_small_download_have_names_of_their_own(folder: Path):
    before = load(folder)
    for name in ("items_shuffle", "items_ins_v2"):
        (folder / f"{name}.json").rename(folder / f"{name}_1000.json")
    assert load(folder) == before


def test_files_may_have_any_name(folder: Path, tmp_path: Path):
    before = load(folder)
    (folder / "items_shuffle.json").rename(folder / "mine.json")
    (folder / "items_human_ins.json").rename(tmp_path / "people.json")
    config = WebShopConfig(data_dir=folder, items_file=Path("mine.json"), human_goals_file=tmp_path / "people.json")
    assert config.files is not None
    assert load_catalogue(config.files, None, human_goals=True) == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"items_file": "a.json"}, "items_file has no effect without data_dir"),
        ({"data_dir": "d", "human_goals_file": "a.json", "human_goals": False}, "no effect with human_goals: false"),
    ],
)
def test_a_file_without_effect_is_rejected(settings: dict[str, object], says: str):
    with pytest.raises(ValidationError, match=says):
        WebShopConfig.model_validate_json(json.dumps(settings))


@pytest.mark.parametrize(
    ("actions", "reward"),
    [
        (["click[green]", "click[buy now]"], 1.0),
        (["click[red | blue]", "click[buy now]"], 2 / 3),
        (["click[buy now]"], 2 / 3),
    ],
)
def test_an_episode_in_the_shop_of_files(folder: Path, actions: list[str], reward: float):
    """The goal wants one attribute, one option and its price: three requirements."""
    goals = {"B000000001": [make_goal()]}
    (folder / "items_human_ins.json").write_text(json.dumps(goals))
    env = WebShopEnv(WebShopConfig(data_dir=folder, split="any"))
    env.reset(seed=0)
    env.step("search[bright lamp]")
    env.step("click[B000000001]")
    results = [env.step(action) for action in actions]
    assert results[-1][1] == pytest.approx(reward)
    assert (results[-1][2], results[-1][4]["success"]) == (True, reward == 1.0)


@pytest.mark.parametrize("value", ["Red / Blue", "dark\u00a0blue", "XL  (tall)"])
def test_an_option_is_clicked_as_it_is_shown(tmp_path: Path, value: str):
    """Whitespace of published values is kept, and that of a click does not count."""
    item = make_item(1, customization_options={"Size": [{"value": value}, {"value": "S"}]})
    shown = value.lower().replace("/", " | ")
    goals = {item["asin"]: [make_goal(instruction_options=[shown])]}
    env = WebShopEnv(WebShopConfig(data_dir=write_files(tmp_path / "shop", [item], {}, goals), split="any"))
    for clicked in (shown, " ".join(shown.split())):
        env.reset(seed=0)
        env.step("search[lamp]")
        assert shown in env.step(f"click[{item['asin']}]")[0]
        assert env.step(f"click[{clicked}]")[4]["action_is_valid"]
        assert env.step("click[buy now]")[4]["r_option"] == 1.0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("items_ins_v2", "{oops", r"items_ins_v2\.json is not JSON: "),
        ("items_ins_v2", "[]", r"items_ins_v2\.json .*expected a mapping from asin: Expected `object`, got `array`"),
        ("items_shuffle", "{}", r"items_shuffle\.json .*expected a list of products: Expected `array`, got `object`"),
        ("items_shuffle", '[{"asin": "B1"}]', r"items_shuffle\.json, product 0 .*missing required field `name`"),
        (
            "items_human_ins",
            '{"B000000001": [{"instruction": "a lamp"}]}',
            r"items_human_ins\.json, product B000000001 .*`instruction_attributes` - at `\$\[0\]`",
        ),
        (
            "items_human_ins",
            "{}",
            r"items_human_ins\.json has no goals for the first 3 products of .*raise num_products",
        ),
    ],
)
def test_a_file_that_is_not_webshops_is_named(folder: Path, name: str, text: str, says: str):
    (folder / f"{name}.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        load(folder)


def test_a_price_that_is_none_is_named(folder: Path):
    (folder / "items_shuffle.json").write_text(json.dumps([make_item(1, pricing="$a.b")]))
    with pytest.raises(ValueError, match=r"product B000000001: expected a pricing like `\$10.99`, got '\$a.b'"):
        load(folder)


@pytest.mark.parametrize("name", ["items_shuffle", "items_ins_v2", "items_human_ins"])
def test_a_missing_file_is_named_with_the_way_to_get_it(folder: Path, name: str):
    (folder / f"{name}.json").unlink()
    with pytest.raises(ValueError, match=rf"no {name}\.json.* in .*setup.sh downloads it; env_config\..*_file"):
        load(folder)
