"""Training of networks by written-out gradients, which takes about half as long as autograd."""
