"""Guards of the product, each tried by an attack and broken by a mutant."""
