"""The machine at hand: processor, memory, GPU, and the user's cache folder."""
