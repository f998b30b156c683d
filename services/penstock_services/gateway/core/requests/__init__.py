"""Request bodies: parsing and validation of submissions, commands, CloudEvents and profiling requests."""
