"""The papers' figures beside ours: one script for each figure or table."""
