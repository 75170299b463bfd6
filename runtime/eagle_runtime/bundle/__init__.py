"""A bundle on disk: its manifest, its files, its graphs."""
