import pytest

from offbeat.envs.webshop.catalogue import Goal, Product, price_limits
from offbeat.envs.webshop.reward import PurchaseScorer, type_reward
from tests.copying import replace

SHIRT = Product(
    asin="B1",
    title="Acme long sleeve shirt",
    query="men shirts",
    product_category="Clothing › Men › Shirts",
    price=30.0,
    price_tag="$30.0",
    attributes=("long sleeve", "machine wash"),
    bullet_points=("Wash it cold",),
    description="Made of soft cotton.",
    options={"color": ("red", "blue"), "size": ("large", "x-large")},
)
GOAL = Goal("a shirt", SHIRT, ("long sleeve", "machine wash"), ("red", "large"), 40.0)


def test_reward_is_the_share_met_times_the_type_reward():
    judge = PurchaseScorer()
    assert judge(GOAL, SHIRT, {"color": "red", "size": "large"}) == (1.0, 1.0, 1.0, 1.0, 1.0)
    assert judge(GOAL, SHIRT, {"color": "red"}).reward == pytest.approx(4 / 5)
    assert judge(GOAL, replace(SHIRT, price=41.0), {}).reward == pytest.approx(2 / 5)
    other = replace(SHIRT, attributes=("slim fit",), title="Nova shirt", query="tops", product_category="Clothing")
    assert judge(GOAL, other, {"color": "red", "size": "large"}).reward == pytest.approx(3 / 5)


def test_sizes_match_exactly_other_options_by_similarity():
    judge = PurchaseScorer()
    assert judge(GOAL, SHIRT, {"size": "x-large"}).r_option == 0
    assert judge(GOAL, SHIRT, {"color": "a red"}).r_option == 0.5


def test_an_attribute_counts_in_every_text_of_the_product():
    judge = PurchaseScorer()
    for attribute in ("soft cotton", "wash it cold", "sleeve long", "shirt"):
        assert judge(replace(GOAL, attributes=(attribute,)), SHIRT, {}).r_att == 1
    assert judge(replace(GOAL, attributes=("silk",)), SHIRT, {}).r_att == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.0),
        ({"title": "Lamp"}, 0.0),
        ({"query": "other", "product_category": "Home", "title": "long lamp"}, 1.0),
        ({"query": "other", "product_category": "Home", "title": "shirt"}, 1.0),
    ],
)
def test_another_category_is_worth_less(changes: dict[str, str], expected: float):
    assert type_reward(SHIRT, replace(SHIRT, **changes)) == expected


def test_dissimilar_titles_are_worth_a_half_or_a_tenth():
    target = replace(SHIRT, title="one two three four five six seven eight")
    strange = {"query": "other", "product_category": "Home"}
    assert type_reward(target, replace(SHIRT, title="eight", **strange)) == 0.5
    longer = replace(SHIRT, title=" ".join(f"word{'x' * i}" for i in range(12)))
    assert type_reward(longer, replace(SHIRT, title="word", **strange)) == 0.1


def test_a_goal_names_one_of_the_next_four_limits_above_the_price():
    assert price_limits(35.0) == (40.0, 50.0, 60.0, 70.0)
    assert price_limits(985.0) == (990.0,)
