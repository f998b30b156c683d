"""Job files: YAML parser, sections, human units, validation errors with remedies, secret detection."""
