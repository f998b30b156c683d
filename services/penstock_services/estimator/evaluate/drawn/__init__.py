"""The report as pictures: what is drawn (`picture`), a page of it (`page`), files of it (`png`)."""
