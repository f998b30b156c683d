"""The published figures, and the models of the papers that the product is compared with."""

import penstock.runtime.single_thread  # noqa: F401 - before any table imports numpy: each core has a simulation of its own
