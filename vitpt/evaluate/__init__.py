"""Evaluation: one pass over a split, exact counts."""
