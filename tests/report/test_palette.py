"""Variants differ in color, and in dash and shape for readers who see no colors."""

import itertools
import random
import re
from importlib import resources

import numpy as np
import pytest

from qkablate.config import conf_dir
from qkablate.report.palette import (
    DARK,
    DASHES,
    LIGHT,
    SHAPES,
    assign_styles,
    to_css,
    use_light_colors,
)
from qkablate.report.render import SHAPE_PATHS

OURS = sorted(path.stem for path in (conf_dir() / "variant").glob("*.yaml"))
FOREIGN = ["residual_q", "no_q+no_o", "zebra", "A", "standard2"]
THEMES = {"light": LIGHT, "dark": DARK}
COLORS = [f"c{i}" for i in range(8)]


def look_of(name, *others):
    return assign_styles([name, *others])[name]


def different(found):
    """Count the looks that differ in color, dash or shape."""
    return len({(look.color, tuple(look.dash), look.shape) for look in found.values()})


# Variants


def test_built_in_variants_have_distinct_styles():
    found = assign_styles(OURS)
    assert sorted(found) == OURS
    assert different(found) == len(OURS) == 29


def test_only_standard_is_gray():
    found = assign_styles(OURS)
    assert found["standard"].color == "var(--c0)"
    assert found["standard"].dash == [1, 0]
    assert [name for name in OURS if found[name].color == "var(--c0)"] == ["standard"]
    red, green, blue = (int(LIGHT["c0"][i : i + 2], 16) for i in (1, 3, 5))
    assert max(red, green, blue) - min(red, green, blue) < 32


@pytest.mark.parametrize("name", OURS)
def test_built_in_variant_has_the_same_style_in_every_report(name):
    alone = look_of(name)
    rng = random.Random(name)
    for count in (1, 3, 10, 25):
        others = rng.sample([one for one in OURS if one != name], count)
        assert look_of(name, *others) == alone
        assert look_of(name, *others, *FOREIGN) == alone
    assert look_of(name, *(f"foreign{i}" for i in range(60))) == alone


def test_styles_do_not_depend_on_the_order_of_variants():
    names = [*OURS, *FOREIGN]
    expected = assign_styles(names)
    for seed in range(5):
        random.Random(seed).shuffle(names)
        assert assign_styles(names) == expected
    assert assign_styles(iter(names + names)) == expected


def test_first_rank_has_the_style_of_its_variant_and_others_differ():
    assert look_of("low_rank_w_r4") == look_of("low_rank_w")
    assert look_of("gqa_g2") == look_of("gqa")
    found = assign_styles(
        ["standard", "low_rank_w_r4", "low_rank_w_r8", "low_rank_w_r16", "merged_w"]
    )
    assert different(found) == 5
    assert found["merged_w"] == look_of("merged_w")


@pytest.mark.parametrize("name", FOREIGN)
def test_user_variants_differ_from_the_others_in_a_report(name):
    for others in ([], ["standard"], ["standard", "merged_w", "shared_qk"], OURS):
        found = assign_styles([name, *others])
        assert different(found) == len(others) + 1
        assert found[name].color != "var(--c0)"
    assert different(assign_styles(["standard", *FOREIGN])) == len(FOREIGN) + 1


def test_few_user_variants_take_no_style_of_a_built_in_variant():
    ours = [look_of(name) for name in OURS]
    assert look_of("residual_q", "standard") not in ours


def test_styles_repeat_when_there_are_more_variants():
    for count in (28, 29, 57, 300):
        names = [f"foreign{i}" for i in range(count)]
        found = assign_styles([*names, *OURS])
        assert {*found} == {*names, *OURS}
        assert different({name: found[name] for name in OURS}) == len(OURS)
    assert assign_styles([]) == {}
    assert assign_styles([""])[""].shape in SHAPES


def test_styles_use_known_colors_dashes_and_shapes():
    for look in assign_styles([*OURS, *FOREIGN]).values():
        assert use_light_colors(look.color) in LIGHT.values()
        assert look.dash in DASHES
        assert look.shape in SHAPES
    assert {*SHAPES} == {*SHAPE_PATHS}


# Colors


def test_both_themes_define_the_same_colors():
    assert [*LIGHT] == [*DARK]
    for color in [*LIGHT.values(), *DARK.values()]:
        assert re.fullmatch("#[0-9a-f]{6}", color)


def linear(color):
    """Convert sRGB to linear light."""
    own = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(own <= 0.04045, own / 12.92, ((own + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """Return the contrast ratio defined by WCAG, from 1 to 21."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_contrast_follows_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("theme", THEMES)
def test_lines_have_enough_contrast(theme):
    colors = THEMES[theme]
    for name in COLORS:
        assert contrast(colors[name], colors["ground"]) >= 3, name


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("text", ["ink", "faint", "link", "warn"])
def test_text_has_enough_contrast(theme, text):
    colors = THEMES[theme]
    for ground in ("ground", "panel"):
        assert contrast(colors[text], colors[ground]) >= 4.5, ground


@pytest.mark.parametrize("theme", THEMES)
def test_numbers_in_the_heat_map_have_enough_contrast(theme):
    colors = THEMES[theme]
    for shade in ("low3", "low2", "low1", "mid", "high1", "high2", "high3"):
        assert contrast(colors["ink"], colors[shade]) >= 4.5, shade


# Machado, Oliveira and Fernandes (2009), at full strength: linear RGB as those who lack a cone see.
VIEWS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def lab(color, view):
    seen = np.clip(VIEWS[view] @ linear(color), 0, 1)
    xyz = TO_XYZ @ seen / (TO_XYZ @ np.ones(3))
    delta = 6 / 29
    x, y, z = np.where(xyz > delta**3, np.cbrt(xyz), xyz / (3 * delta**2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_color_distance_follows_cielab():
    assert lab("#ffffff", "all cones") == pytest.approx([100, 0, 0], abs=1e-6)
    assert lab("#ff0000", "all cones") == pytest.approx([53.24, 80.09, 67.20], abs=0.02)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("view", VIEWS)
def test_hues_are_distinct_for_color_blind_readers(theme, view):
    seen = {name: lab(THEMES[theme][name], view) for name in COLORS}
    near = {
        pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]]))
        for pair in itertools.combinations(COLORS, 2)
    }
    assert min(near.values()) >= 15, min(near, key=near.get)


# Names of colors


def sources():
    """Return the sources of the report that may name a color."""
    root = resources.files("qkablate.report")
    files = [*root.iterdir(), *(root / "charts").iterdir()]
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith((".py", ".css", ".html", ".js"))
    }


def test_charts_use_only_colors_of_the_palette():
    named = {
        (name, found)
        for name, text in sources().items()
        for found in re.findall(r"var\(--([\w-]+)\)", text)
    }
    assert len(named) > 15
    assert {found for _, found in named} <= {*LIGHT}, named
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b", sources()["page.css"])


def test_light_colors_replace_all_css_variables():
    text = " ".join(f"var(--{name})" for name in LIGHT)
    assert use_light_colors(text) == " ".join(LIGHT.values())
    assert use_light_colors("no names") == "no names"


def test_style_sheet_defines_every_color():
    for colors in (LIGHT, DARK):
        said = dict(one.split(":") for one in to_css(colors).split(";"))
        assert said == {f"--{name}": color for name, color in colors.items()}
