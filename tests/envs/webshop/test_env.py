import re

import numpy as np
import pytest

from offbeat.envs import registry
from offbeat.envs.webshop import WORDS, WebShopConfig, WebShopEnv
from offbeat.envs.webshop.generator import make_catalogue
from offbeat.envs.webshop.pages import ItemPage, ResultsPage, SearchPage


def shop(**settings: object) -> WebShopEnv:
    env = registry.make("webshop", {"num_products": 200, **settings})
    env.reset(seed=1)
    return env


def buy(env: WebShopEnv, asin: str, options: tuple[str, ...]) -> tuple[str, float, bool, bool, dict[str, object]]:
    product = next(product for product in env._catalogue.products if product.asin == asin)
    env.step(f"search[{product.title} {' '.join(product.attributes)}]")
    while asin not in [shown.asin for shown in env.page.shown]:
        assert env.step("click[Next >]")[4]["action_is_valid"]
    env.step(f"click[{asin.lower()}]")
    for option in options:
        assert env.step(f"click[{option}]")[4]["action_is_valid"]
    return env.step("click[Buy Now]")


def test_the_right_purchase_gets_reward_one():
    env = shop()
    for seed in range(12):
        env.reset(seed=seed)
        _, reward, terminated, _, info = buy(env, env.goal.product.asin, env.goal.options)
        assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_missing_options_reduce_the_reward():
    env = shop()
    total = len(env.goal.attributes) + len(env.goal.options) + 1
    _, reward, _, _, info = buy(env, env.goal.product.asin, ())
    assert reward == pytest.approx((len(env.goal.attributes) + 1) / total)
    assert (info["success"], info["r_type"], info["r_att"], info["r_option"], info["r_price"]) == (False, 1, 1, 0, 1)


def test_a_walk_through_the_pages():
    env = shop()
    assert env.step("click[Buy Now]")[4]["action_is_valid"] is False
    results = env.step("search[shirt jacket dress shorts sweater]")[0]
    assert "[SEP] Page 1 (Total results: " in results
    assert "< Prev" not in results
    first = re.findall(r"B\d{4}", results)
    assert len(first) == 10
    second = env.step("click[next >]")[0]
    assert "Page 2" in second
    assert not set(first) & set(re.findall(r"B\d{4}", second))
    assert env.step("click[< Prev]")[0] == results
    item = env.step(f"click[{first[3]}]")[0]
    assert item.endswith("Description [SEP] Features [SEP] Reviews [SEP] Attributes [SEP] Buy Now")
    assert "it is" in env.step("click[Features]")[0]
    assert env.step("click[< Prev]")[0] == item
    color = next(iter(env.page.product.options.values()))[0]
    assert f"( {color} )" in env.step(f"click[{color}]")[0]
    assert env.step("click[< Prev]")[0] == results
    env.step("click[Back to Search]")
    assert isinstance(env.page, SearchPage)


def test_search_is_valid_only_on_the_search_page():
    env = shop()
    assert env.step("search[lamp]")[4]["action_is_valid"]
    assert isinstance(env.page, ResultsPage)
    assert not env.step("search[rug]")[4]["action_is_valid"]


def test_search_results_are_sorted_by_relevance():
    env = shop()
    for seed in range(8):
        env.reset(seed=seed)
        product = env.goal.product
        env.step(f"search[{product.title} {' '.join(product.attributes)}]")
        assert env.page.shown[0].title == product.title
    env.step("click[Back to Search]")
    assert "Total results: 0" in env.step("search[xylophone]")[0]
    env.step("click[Back to Search]")
    assert "Total results: 0" in env.step("search[!!!]")[0]


@pytest.mark.parametrize("answer", ["", "search[]", "click[nowhere]", "buy", "search[  ]"])
def test_an_invalid_action_costs_the_penalty_and_changes_nothing(answer: str):
    env = shop(format_penalty=-0.05)
    before = env.page
    _, reward, terminated, _, info = env.step(answer)
    assert (reward, terminated, env.page, info["action_is_valid"]) == (-0.05, False, before, False)


def test_an_answer_pattern_picks_the_action_out_of_thoughts():
    env = shop(action_pattern="<answer>(.*?)</answer>")
    assert env.step("I click[x] <answer> search[ lamp ] </answer>")[4]["action_is_valid"]
    assert not env.step("click[back to search]")[4]["action_is_valid"]


def test_actions_and_instruction_are_shown_as_configured():
    env = shop(show_actions=True, show_instruction="first")
    assert env.reset(seed=2)[0].endswith("Actions: search[words]")
    page = env.step("search[lamp]")[0]
    assert "Instruction:" not in page
    assert "\nActions: click[Back to Search], click[B" in page


def test_settings_determine_the_shop_and_splits_are_disjoint():
    train, held_out = (WebShopEnv(WebShopConfig(split=split))._goals for split in ("train", "held_out"))
    assert len(train) == 875
    assert len(held_out) == 125
    assert not {id(goal) for goal in train} & {id(goal) for goal in held_out}
    assert WebShopEnv(WebShopConfig())._goals == train
    assert WebShopEnv(WebShopConfig(catalogue_seed=1))._goals != train


@pytest.mark.parametrize("num_products", [5, 200, 1000])
def test_no_goal_of_training_equals_a_held_out_one(num_products: int):
    for seed in range(6):
        catalogue = make_catalogue(seed, num_products)
        train, held_out = (
            {(goal.product.asin, goal.instruction) for goal in catalogue.split(name)} for name in ("train", "held_out")
        )
        assert train
        assert not train & held_out
        assert len(catalogue.split("held_out")) == max(1, 2 * num_products // 8)


def test_every_word_of_an_episode_is_in_the_word_list():
    env, rng = shop(), np.random.default_rng(0)
    for seed in range(10):
        texts = [env.reset(seed=seed)[0]]
        for _ in range(15):
            answer = env.random_answer(rng)
            texts += [answer, env.step(answer)[0]]
        assert set(" ".join(texts).split()) <= set(WORDS)


def test_max_steps_truncates_and_an_item_page_keeps_choices():
    env = shop(max_steps=3)
    env.step("search[shirt]")
    env.step(f"click[{env.page.shown[0].asin}]")
    value = env.page.product.options["color"][0]
    assert env.step(f"click[{value}]")[3] is True
    assert isinstance(env.page, ItemPage)
    assert env.page.chosen == {"color": value}


def test_invalid_settings_are_refused(tmp_path):
    assert "at most 1,000 products" in registry.check_env_config("webshop", {"num_products": 2_000})[0]
    with pytest.raises(ValueError, match=r"no items_shuffle.json or .* in .*leave data_dir unset"):
        registry.make("webshop", {"data_dir": str(tmp_path)})
