"""Long trials of a bundle: python -m studies.trials.adversarial, python -m studies.trials.soak."""
