"""The pages of the site that are made from the code: nothing that a user may call is left out or undescribed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

import eagle_runtime
from reference import SCRIPT, api_page, commands_page, parsers
from site_pages import ELSEWHERE, ROOT, contents, page

PARSERS = parsers()


def all_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command, and every subcommand by its name."""
    for name, parser in PARSERS.items():
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {sub}", child) for sub, child in action.choices.items())


def test_every_command_of_the_package_has_its_section() -> None:
    made = commands_page()
    assert len(SCRIPT.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8"))) == len(PARSERS) >= 9
    for name, parser in all_parsers():
        assert f"# {name}\n" in made
        assert all(
            f"`{action.option_strings[-1]}" in made or action.option_strings[-1] in made
            for action in parser._actions
            if action.option_strings
        )


@pytest.mark.parametrize(("name", "parser"), list(all_parsers()), ids=[name for name, _ in all_parsers()])
def test_every_option_says_what_it_does(name: str, parser: argparse.ArgumentParser) -> None:
    assert [action.dest for action in parser._actions if not action.help and action.option_strings] == []


def test_every_public_name_has_its_section() -> None:
    made = api_page()
    sections = made.split("\n## ")
    assert [section.split("\n")[0] for section in sections[1:]] == eagle_runtime.__all__
    assert all(len(section.split("```")[-1].strip()) > 20 or "`" in section for section in sections[1:])
    assert "### EagleModel.generate\n" in made and "max_new_tokens" in made


def test_links_out_of_the_pages_lead_to_the_repository() -> None:
    text = (
        "[a](../README.md), [b](trees.md#figures), [c](https://x.y/z.md), [d](../tools/demo_pair/README.md#x), [e](#f)"
    )
    shown = page(text, ROOT / "docs")
    assert shown == text.replace("../README.md", f"{ELSEWHERE}README.md").replace("../tools", f"{ELSEWHERE}tools")


def test_the_table_of_contents_has_every_page() -> None:
    """A page that the index does not link could not be found."""
    listed = contents((ROOT / "docs" / "index.md").read_text(encoding="utf-8")).splitlines()[3:-3]
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == pages - {"index"}
