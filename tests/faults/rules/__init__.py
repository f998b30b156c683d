"""Rules that hold of any cell, by bookkeeping of the judges' own; they share no code with the product."""
