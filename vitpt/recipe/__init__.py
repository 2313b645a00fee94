"""Recipes: the schema, and loading with every error at once."""
