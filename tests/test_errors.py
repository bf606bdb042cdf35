"""Wording of errors that the user can correct."""

import pytest

from qkablate.errors import UserError, find_nearest, install_hint, not_one_of, require_extra

SHORT, LONG = ("html", "md", "png", "svg"), tuple(f"name_{n}" for n in range(9))


def test_case_plays_no_part_and_no_word_is_near_to_none():
    assert find_nearest("MERGED_X", ["merged_w", "MQA"]) == "merged_w"
    assert find_nearest("mqb", ["merged_w", "MQA"]) == "MQA"
    assert find_nearest("", ["", "-"]) == ""
    assert "one of name_7, " in not_one_of("NAME_77", LONG)


def test_long_list_without_a_command_gives_the_number_of_the_others():
    assert not_one_of("name_77", LONG, "").endswith(" and 6 more")


@pytest.mark.parametrize(
    ("word", "nearest"), [("htm", "html"), ("pdf", "svg"), ("pfd", "svg"), ("MARKDOWN", "md")]
)
def test_nearest_name_comes_before_the_list(word, nearest):
    assert not_one_of(word, SHORT) == (
        f"'{word}' (nearest: {nearest}) is not one of html, md, png, svg"
    )


def test_long_list_is_cut_to_the_nearest_and_the_command_that_has_all():
    text = not_one_of("name_77", LONG, "qkablate names")
    assert text.startswith("'name_77' (nearest: name_7) is not one of name_7, ")
    assert text.endswith(", … (`qkablate names` lists all 9)")
    assert text.count("name_") == 5  # the word, the nearest, and three of the list


def test_word_is_quoted_without_control_characters_and_cut():
    text = not_one_of("\x1b[2J" + "x" * 1000, SHORT)
    assert "\x1b" not in text
    assert len(text) < 100


def test_missing_extra_is_installed_from_a_clone():
    with pytest.raises(UserError, match=r"of the extra 'slurm': pip install '\.\[slurm\]' in a cl"):
        require_extra("slurm", "qkablate_has_no_such_module")
    assert "qkablate[" not in install_hint("ray")
