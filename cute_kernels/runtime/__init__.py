"""The host side that all families share: checks, targets, operators, the launch cache, autograd."""
