"""Checks an NVIDIA GPU with a kit."""
