"""``llms.txt``: short, its links lead to pages, and its commands exist."""

from __future__ import annotations

import re

import click
import pytest

import fastgraph
from fastgraph import tested
from fastgraph.cli.main import cli
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs" / "llms.txt").read_text()
COMMANDS = re.findall(r"`python -m fastgraph ([^`]*)`", TEXT)


def test_it_has_the_usual_form_and_is_short() -> None:
    lines = TEXT.splitlines()
    assert lines[0] == "# fastgraph" and lines[2].startswith("> ")
    assert len(lines) < 60


def test_links_lead_to_pages() -> None:
    targets = re.findall(r"\]\(([^)]*)\)", TEXT)
    assert len(targets) > 10
    assert not [target for target in targets if not (ROOT / "docs" / target).is_file()]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    words = command.split()
    if words[0] in cli.commands:
        return
    known = {name for option in cli.commands["run"].params for name in option.opts}
    assert isinstance(cli.commands["run"], click.Command)
    assert {word for word in words if word.startswith("-")} <= known


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 7


def test_names_of_the_package_exist() -> None:
    names = re.findall(r"fastgraph\.(\w+)\(", TEXT)
    assert names and all(hasattr(fastgraph, name) for name in names)


def test_the_lowest_torch_is_the_tested_one() -> None:
    assert f"torch {'.'.join(map(str, tested.TESTED['torch'].first))} or later" in TEXT
