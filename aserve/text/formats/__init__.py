"""How models write thoughts and calls of tools: a declarative format a family, and one incremental parser of them."""
