"""Grows a small pair to a larger shape whose logits stay the same up to rounding; the command is tools/grow.py."""
