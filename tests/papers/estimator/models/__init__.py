"""The papers' estimator models, exactly."""
