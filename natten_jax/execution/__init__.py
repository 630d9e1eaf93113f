"""The passes of a call as JAX runs and differentiates them."""
