"""Commands that only read: `get`, `describe`, `why`, `queue`, `eta`, `watch`, `top`, and their tables."""
