"""The published figures, and the models of the papers that the product is compared with."""

# Before any table imports numpy, since each core has a simulation of its own.
import penstock.runtime.single_thread  # noqa: F401
