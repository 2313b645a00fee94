"""Being here puts this folder on the import path of all tests (`oracles.py`)."""
