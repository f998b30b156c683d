"""How fast jobs step: what running ones told, what the step model learns of it, run times, plans of what to measure."""
