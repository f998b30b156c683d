"""Reports of running tasks: parser of progress lines, rate limits and sampling filters of publications."""
