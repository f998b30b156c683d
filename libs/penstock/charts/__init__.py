"""Charts and reports: Altair definitions,
rendered as one self-contained HTML page or as PNG files by vl-convert."""
