"""Who asks the placer for changes, on views of the cell that may be out of date."""
