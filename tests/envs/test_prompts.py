from offbeat.envs.prompts import fill_template


def test_a_template_is_filled_and_keeps_other_braces():
    text = fill_template(
        '{"turn": {step}, "left": {actions_left}} {observation}', observation="P", step=2, actions_left=3
    )
    assert text == '{"turn": 2, "left": 3} P'


def test_braces_in_the_observation_stay():
    assert fill_template("{step}: {observation}", observation="{step}{observation}", step=1, actions_left=1) == (
        "1: {step}{observation}"
    )
