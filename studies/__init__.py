"""Measurements behind tables of the documentation; each is repeated by one command (`python -m studies NAME`)."""
