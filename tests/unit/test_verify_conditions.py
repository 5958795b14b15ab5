"""The conditions that verify knows name options that an engine takes."""

from __future__ import annotations

import pytest

from epicycle.tools.engine_options import read_options
from epicycle.tools.verify_conditions import CONDITIONS


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_changes_what_an_engine_has_and_to_a_value_it_takes(name: str) -> None:
    options = CONDITIONS[name].options
    read = read_options(options)

    assert options == {option: getattr(read, option) for option in options}
