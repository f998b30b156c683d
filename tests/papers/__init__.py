"""The published figures, and the models of the papers that the product is compared with."""
