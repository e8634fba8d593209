"""Users' models as a network with its loss and data."""
