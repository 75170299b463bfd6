"""Scripts around published models that can be installed as packages. No weights of theirs are kept here."""
