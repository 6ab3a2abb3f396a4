"""Reports as plain text."""

from __future__ import annotations

import pytest

from float8_compile.table import text_table


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_stand_right() -> None:
    table = text_table(("name", "K", "share"), [("up", 4096, "12.5%"), ("a long name", 16, "-1,000.0"), ("", 0, 7)])
    assert table == (
        "name            K     share\n"
        "-----------  ----  --------\n"
        "up           4096     12.5%\n"
        "a long name    16  -1,000.0\n"
        "                0         7"
    )


def test_one_word_among_numbers_makes_a_column_of_words() -> None:
    assert text_table(("bytes",), [(1024,), ("none",)]) == "bytes\n-----\n1024\nnone"


def test_without_rows_there_is_still_a_header() -> None:
    assert text_table(("layer", "K"), []) == "layer  K\n-----  -"


def test_lines_do_not_end_in_spaces() -> None:
    lines = text_table(("a", "b"), [("x", "a long cell"), ("y", "")]).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("row", [("x",), ("x", 1, 2)], ids=["too few", "too many"])
def test_a_row_of_another_length_is_refused(row: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, IndexError)):
        text_table(("a", "b"), [row])
