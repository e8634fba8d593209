"""Keep what runs in a process of its own out of the others: its import teaches torch a device."""

collect_ignore = ["counts.py", "place.py", "simulated.py", "trainings.py", "values.py"]
