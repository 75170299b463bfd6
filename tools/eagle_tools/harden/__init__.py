"""Gives a pair the activations that make real models hard to quantise, at unchanged logits; see tools/harden.py."""
