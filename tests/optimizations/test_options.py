"""Options of the backend: known names, checked values, messages that say what is allowed."""

from __future__ import annotations

import dataclasses

import pytest

from optimizations import Options, WrongOption


def test_given_options_replace_defaults() -> None:
    options = Options.parse({"stage_limit_bytes": 10, "inductor": {"max_autotune": True}})
    assert options == Options(stage_limit_bytes=10, inductor={"max_autotune": True})


def test_unknown_option_names_it_the_nearest_and_all_known_ones() -> None:
    with pytest.raises(WrongOption) as caught:
        Options.parse({"hoist_limit": 3})
    message = str(caught.value)
    assert "'hoist_limit'" in message
    assert "did you mean hoist_limit_bytes" in message and "? Known: placement" in message
    for option in dataclasses.fields(Options):
        assert option.name in message
    with pytest.raises(WrongOption, match="of backend 'encore'; known: placement"):
        Options.parse({"zzz": 3})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("indirection", "device", "'off', 'auto'"),
        ("placement", 1, "True or False"),
        ("hoist_limit_bytes", "1 MB", "an int"),
        ("hoist_limit_bytes", True, "an int"),
        ("stage_limit_bytes", -1, "a number of bytes"),
        ("inductor", "max-autotune", "a mapping"),
        ("selection", True, "'rule', 'measure', 'off'"),
    ],
)
def test_wrong_value_names_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(WrongOption, match=name) as caught:
        Options.parse({name: value})
    assert allowed in str(caught.value)


@pytest.mark.parametrize("selection", ["measure", "rule"])
def test_selection_requires_encores_graphs(selection: str) -> None:
    with pytest.raises(WrongOption, match="indirection='off'") as caught:
        Options.parse({"selection": selection, "indirection": "off"})
    assert "leave indirection at 'auto'" in str(caught.value)
    assert Options.parse({"selection": selection, "indirection": "host"}).selection == selection
