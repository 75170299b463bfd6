"""Engines behind one protocol (protocol.py)."""
