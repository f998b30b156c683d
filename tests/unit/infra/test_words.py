"""Pages stay readable: a page with an endless sentence, an overfull cell or a README of two screens fails the
lint."""

from pathlib import Path

import pytest

from infra.lints import words
from infra.lints.decisions import DECISIONS
from infra.lints.messages import messages
from infra.lints.words import found, found_in_messages, sentences

LONG = " ".join(f"word{number}" for number in range(41))


def texts(page: str, *, is_readme: bool = False) -> list[str]:
    return [f"{line}: {text.partition(':')[0]}" for line, text in found(page, is_readme=is_readme)]


def test_a_sentence_that_nobody_finishes_is_found_with_its_line() -> None:
    """An author adds one more clause, and one more, behind the same comma."""
    page = f"# Title\n\nA short one.\n\n{LONG}.\n"
    assert texts(page) == [
        "5: a sentence of 41 words, 40 at most",
        "0: sentences of 22.0 words in the mean, 20 at most",
    ]


def test_a_page_of_long_sentences_is_found_though_none_is_too_long() -> None:
    """Thirty words each: every sentence is allowed, the page is not."""
    thirty = " ".join(["word"] * 30)
    assert texts(f"{thirty}.\n\n- {thirty}.\n") == ["0: sentences of 30.0 words in the mean, 20 at most"]
    assert texts(f"{thirty}.\n\n- Short.\n") == []


def test_an_overfull_cell_of_a_table_is_found() -> None:
    """Everything that works today, in one cell."""
    assert texts(f"| a | b |\n|---|---|\n| short | {LONG} |\n") == ["3: a table cell of 41 words, 40 at most"]


def test_only_the_readme_has_to_fit_on_a_screen() -> None:
    """Six hundred words and one, in short sentences."""
    page = "Go on. " * 300 + "End."
    assert texts(page) == []
    assert texts(page, is_readme=True) == ["0: 601 words, 600 at most"]


def test_what_is_not_prose_is_left_out() -> None:
    """Commands, generated marks, headings and targets of links do not make a sentence long."""
    page = (
        f"## {LONG}\n```console\n{LONG}\n```\n<!-- {LONG} -->\nRun `{LONG}`, see "
        f"[here]({LONG.replace(' ', '/')}).\n"
    )
    assert texts(page) == []
    assert list(
        sentences("1. One e.g. here. Two, as in Alg. 1 and\n   eq. 4? `Three`.\n2. Four\n\nFive.")
    ) == [
        (1, "One e.g here."),
        (1, "Two, as in Alg 1 and eq 4?"),
        (1, "`code`."),
        (3, "Four"),
        (5, "Five."),
    ]


def test_the_command_fails_on_a_bad_page_and_above_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decision records are pages, too."""
    monkeypatch.setattr(words, "ROOT", tmp_path)
    record = tmp_path / DECISIONS / "0001-long.md"
    record.parent.mkdir(parents=True)
    guide = tmp_path / "guide.md"
    for page in (record, guide):
        page.write_text("Run it.\n")
    for page in (record, guide):
        assert words.main([]) == 0
        page.write_text(f"{LONG}.\n")
        assert words.main([]) == 1
        assert f"{page.name}:1: a sentence of 41 words" in capsys.readouterr().out
        page.write_text("Run it.\n")
    guide.write_text("Run it.\n" * words.MAX_WORDS)
    assert words.main([]) == 1
    assert "all Markdown: 148,002 words, 74,000 at most" in capsys.readouterr().out


MODULE = f'''"""{LONG}."""

STATEMENT = "SELECT a, b, c, d FROM t"
SCHEMA = """CREATE TABLE one (a, b);
CREATE TABLE two (c, d);
CREATE TABLE three (e, f);"""


def refused(name: str) -> ValueError:
    """{LONG}."""
    return ValueError(f"{{name}} is not a valid name; give "
                      "letters and digits")
'''


def test_messages_are_found_and_docstrings_and_statements_are_not() -> None:
    """A refusal that users read stands among docstrings, a query and a schema. Its field is one word."""
    assert [*messages(MODULE)] == [(11, "X is not a valid name; give letters and digits")]
    assert [*found_in_messages({"m.py": MODULE})] == []


def test_an_endless_message_is_found_with_its_line() -> None:
    """One more clause for one more case, in a part of an f-string: the parts are messages, too."""
    source = f"""raise ValueError(
    f"why: {{'{LONG}' if late else ''}} and so on, and so forth"
)"""
    assert [text.partition(": word0")[0] for text in found_in_messages({"m.py": source})] == [
        "m.py:2: a message with a sentence of 41 words, 40 at most",
        "messages: sentences of 24.5 words in the mean, 20 at most",
    ]
