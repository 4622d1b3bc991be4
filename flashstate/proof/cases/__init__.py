"""The cases of every op, one file each: inputs, what they move, and tables of them."""
