"""Array arguments of the operators."""
