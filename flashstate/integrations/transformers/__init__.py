"""Models of Transformers that decode on flashstate."""
