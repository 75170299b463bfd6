"""Families of target models: one small declaration each, and what the exporter derives from it."""
