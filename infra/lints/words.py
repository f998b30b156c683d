"""Lint of Markdown pages and of messages: length of sentences, table cells, the README, and all pages.

A page that nobody finishes explains nothing, nor does such a message. The messages of the product
(`infra.lints.messages`) keep to the same bounds, their mean over all messages. On every page:

- a sentence has at most 40 words, and the sentences of a page at most 20 in the mean
- a cell of a table has at most 40 words

The root's README has at most 600 words, and all Markdown at most `MAX_WORDS`.

Sentences are those of paragraphs and list items. Blocks of code, headings and tables are left out of them. A
span of code is one word, and a link is its text.
"""

import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infra.codegen.docs import documents
from infra.lints.messages import messages

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
PRODUCT = ("libs", "services")
MAX_SENTENCE, MAX_MEAN, MAX_CELL = 40, 20.0, 40
MAX_README, MAX_WORDS = 600, 74_000
"""In words, as `wc -w` counts them."""
CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SPAN = re.compile(r"(`+)(?!`).+?\1", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[\"')*_”]*\s+(?=[A-Z0-9\"'(*_“§`])")
ABBREVIATION = re.compile(r"\b(Alg|Algs|App|cf|e\.g|Eq|eq|Fig|fig|i\.e|No|Sec|Tab|vs)\.\s+")
WORD = re.compile(r"\S*\w\S*")


class Finding(NamedTuple):
    """What is wrong with a page."""

    line: int
    """From 1; 0: the page as a whole."""
    text: str


def counted(text: str) -> int:
    """Words between white space, as `wc -w` counts them."""
    return len(text.split())


def _plain(text: str) -> str:
    """The text as a reader sees it, on as many lines: links are their text, a span of code is one word."""
    return LINK.sub(r"\1", SPAN.sub(lambda match: "`code`" + _blank(match), text))


def _blank(match: "re.Match[str]") -> str:
    return "\n" * match[0].count("\n")


def _is_row(line: str) -> bool:
    return line.lstrip().startswith("|")


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of each paragraph and list item."""
    text = _plain(COMMENT.sub(_blank, CODE.sub(_blank, page)))
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        ends = not line.strip() or _is_row(line) or line.startswith("#")
        if (ends or ITEM.match(line)) and lines:
            yield start, " ".join(lines)
            lines = []
        if not ends:
            start = start if lines else number
            lines.append(ITEM.sub("", line).strip())


def sentences(page: str) -> Iterator[tuple[int, str]]:
    """(line on which its paragraph or list item begins, text) of each sentence."""
    for line, block in blocks(page):
        for sentence in END.split(ABBREVIATION.sub(r"\1 ", block)):
            if WORD.search(sentence):
                yield line, sentence


def lengths(text: str) -> Iterator[tuple[int, str]]:
    """(words, sentence) of each sentence of a message, in order."""
    for sentence in END.split(ABBREVIATION.sub(r"\1 ", SPAN.sub("`code`", text))):
        if words := len(WORD.findall(sentence)):
            yield words, sentence


def cells(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each cell of a table."""
    for number, line in enumerate(_plain(CODE.sub(_blank, page)).splitlines(), 1):
        if _is_row(line):
            yield from ((number, cell) for cell in line.replace(r"\|", "/").strip().strip("|").split("|"))


def found(page: str, *, is_readme: bool = False) -> Iterator[Finding]:
    """Every violation on a page."""
    lengths = []
    for line, sentence in sentences(page):
        words = len(WORD.findall(sentence))
        lengths.append(words)
        if words > MAX_SENTENCE:
            yield Finding(line, f"a sentence of {words} words, {MAX_SENTENCE} at most: {sentence[:60]} …")
    if lengths and (mean := statistics.mean(lengths)) > MAX_MEAN:
        yield Finding(0, f"sentences of {mean:.1f} words in the mean, {MAX_MEAN:.0f} at most")
    for line, cell in cells(page):
        if (words := len(WORD.findall(cell))) > MAX_CELL:
            yield Finding(line, f"a table cell of {words} words, {MAX_CELL} at most: {cell.strip()[:60]} …")
    if is_readme and counted(page) > MAX_README:
        yield Finding(0, f"{counted(page)} words, {MAX_README} at most")


def found_in_messages(modules: Mapping[str, str]) -> Iterator[str]:
    """Every violation of the messages in these modules, name → source."""
    all_words = []
    for name, source in modules.items():
        for line, message in messages(source):
            for words, sentence in lengths(message):
                all_words.append(words)
                if words > MAX_SENTENCE:
                    yield (
                        f"{name}:{line}: a message with a sentence of {words} words, {MAX_SENTENCE} at most: "
                        f"{sentence[:60]} …"
                    )
    if all_words and (mean := statistics.mean(all_words)) > MAX_MEAN:
        yield f"messages: sentences of {mean:.1f} words in the mean, {MAX_MEAN:.0f} at most"


def _modules() -> Mapping[str, str]:
    paths = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def main(arguments: Sequence[str]) -> int:
    """Prints what is wrong with these pages, or with all messages, all pages and their sum; 1 where anything
    is."""
    pages = [Path(name).resolve() for name in arguments] or documents(ROOT)
    total, failed = 0, False
    for text in () if arguments else found_in_messages(_modules()):
        failed = True
        print(text)
    for path in pages:
        page, name = path.read_text(), path.relative_to(ROOT).as_posix()
        total += counted(page)
        for finding in found(page, is_readme=name == README):
            failed = True
            print(f"{name}:{finding.line}: {finding.text}")
    if not arguments and total > MAX_WORDS:
        failed = True
        print(f"all Markdown: {total:,} words, {MAX_WORDS:,} at most: shorten a page for what you add")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
