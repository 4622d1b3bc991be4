"""StatePool: the states of a model, handed out to requests slot by slot."""
