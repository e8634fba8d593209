"""What flatness costs in time and memory: scoring, training, all layers, a search."""
