"""Starting a run elsewhere: one description of a launch, rendered for the place that it runs at."""
