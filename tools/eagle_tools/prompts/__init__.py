"""Makes prompts of many kinds for a target to answer, as training data for a head: questions that the target asks
itself, and templates over open text that is installed anyway."""
