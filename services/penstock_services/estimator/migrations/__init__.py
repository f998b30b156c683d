"""SQL files of the estimator's schema, in order; see penstock.runtime.database.migrations."""
