"""What this machine is, and the user's cache folder on it."""
