"""Draft heads: one module each for EAGLE-1/2 and EAGLE-3, used by export and training alike."""
