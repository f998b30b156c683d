"""Real servers for tests, builders, conformance suites, independent judges."""
