"""Recipes: what turns the traced graphs of a pair into those of a precision. The lists stand in plan.py."""
