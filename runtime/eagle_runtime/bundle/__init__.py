"""The bundle folder: its manifest and files."""
