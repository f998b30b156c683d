"""The services of Penstock: one package each, with a pure core and a thin shell."""
