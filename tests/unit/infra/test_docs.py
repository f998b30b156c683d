"""Pages for people: every link leads somewhere, and the glossary explains the words that it promises."""

import re
from pathlib import Path

import pytest

from infra.codegen.schemas import ROOT

PAGES = sorted(
    path
    for folder in ("libs", "services", "infra", "tests", "tilt")
    for path in (ROOT / folder).rglob("*.md")
) + sorted(ROOT.glob("*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are made on the web."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """A page was moved, or a heading renamed."""
    for path, anchor in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_the_glossary_has_ten_words_and_the_readme_names_it() -> None:
    glossary = ROOT / "libs/penstock/GLOSSARY.md"
    words = re.findall(r"^\| \*\*([a-z]+)\*\* \|", glossary.read_text(), re.MULTILINE)
    assert len(set(words)) == len(words) == 10
    assert {"cell", "ledger", "term", "gang"} <= set(words)
    assert f"({glossary.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
    for variable in re.findall(r"`(PENSTOCK_[A-Z_]+)`", glossary.read_text()):
        assert any(variable in page.read_text() for page in PAGES if page != glossary), variable
