"""Data in flight: from the index of a split to batches of pixels."""
