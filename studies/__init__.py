"""Measurements behind tables of the documentation; each is repeated by one command (`python -m studies NAME`). Trials
that run for hours are in trials/."""
