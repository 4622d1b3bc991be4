"""flashstate inside other people's engines; each is imported only where it is used."""
