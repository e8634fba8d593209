"""A trained network with its loss and data; its layers, found and recorded."""
