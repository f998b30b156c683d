"""Guides are followed as a reader follows them: what a page shows and a command does not print is found."""

from pathlib import Path

from tests.support.pages import Command, File, lacking, steps

PAGE = """
Write this file:

```yaml job.yaml
command: [true]
```

```console
$ penstock submit -f job.yaml   # follows the job
… succeeded
$ penstock wait gone \\
    --timeout 0   # it goes on, exit code 124
```

```text
$ not typed
```
"""


def test_files_and_commands_of_a_page_come_in_their_order(tmp_path: Path) -> None:
    """A comment behind a command is not typed; it may say how the command ends."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert steps(page) == [
        File("job.yaml", "command: [true]\n"),
        Command("penstock submit -f job.yaml", 0, ("… succeeded",)),
        Command("penstock wait gone      --timeout 0", 124, ()),
    ]


def test_a_line_that_is_shown_and_not_printed_is_found() -> None:
    """A message was reworded, and the guide shows the former words; tables may be wider than the page
    shows."""
    printed = "NAME   STATE\n digits │ succeeded   node-1\n"
    assert lacking(["… digits succeeded …"], printed, "") == ""
    assert lacking(["… digits failed …"], printed, "") == "… digits failed …"
    assert lacking(["succeeded", "digits"], printed) == "digits", "lines come in the page's order"
    assert lacking(["… due …", "… digits …"], printed, "due 14:30") == "", "of either stream"
